# Four RDMA devices rxe0 ... rxe3 on one bridge: rank i takes rxe<i>, with address 10.77.0.<i+1>.
# One network namespace for all, because this kernel's rxe works in the first one only.
set -e
ranks="0 1 2 3"

{
    echo link add br0 mtu 9000 type bridge
    echo link set br0 up
    for i in $ranks; do
        echo link add veth$i mtu 9000 type veth peer name port$i mtu 9000
        echo link set port$i master br0 up
        echo address add 10.77.0.$((i + 1))/24 dev veth$i
    done
} | ip -batch -

# Both ends of a connection are addresses of this machine, which the kernel would refuse to take
# from outside (accept_local, rp_filter); and each device answers for its own address only.
conf=/proc/sys/net/ipv4/conf
echo 0 > $conf/all/rp_filter
for i in $ranks; do
    echo 1 > $conf/veth$i/accept_local
    echo 0 > $conf/veth$i/rp_filter
    echo 1 > $conf/veth$i/arp_ignore
    echo 2 > $conf/veth$i/arp_announce
done

for i in $ranks; do echo link set veth$i up; done | ip -batch -
for i in $ranks; do echo link add rxe$i type rxe netdev veth$i; done > /run/tokenyard-vm-rdma
rdma -b /run/tokenyard-vm-rdma
