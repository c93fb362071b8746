#!/bin/busybox sh
# First process of the test machine, from the initramfs: loads the modules, puts a writable layer in
# memory over the host's files, brings the network up, runs the job, says its exit code, ends.

/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev

# Whole lines on the kernel's console, in order with the kernel's own. guest.rs reads them.
say() {
    echo "<1>tokenyard-vm: $*" > /dev/kmsg
}
fail() {
    say "failed $*"
    poweroff -f
}

while read -r module; do
    insmod "/modules/$module" || fail "to load the kernel module $module"
done < /modules/order

mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro host /host ||
    fail "to mount the host's files (9p)"
mount -t tmpfs -o size=75% tmpfs /layer && mkdir /layer/upper /layer/work &&
    mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work overlay /root ||
    fail "to put a writable layer over the host's files (overlay)"
for folder in proc sys dev; do
    mount -o bind "/$folder" "/root/$folder" || fail "to show /$folder to the job"
done
mkdir -p /root/dev/shm /root/dev/pts
mount -t tmpfs tmpfs /root/dev/shm || fail "to mount /dev/shm"
mount -t devpts devpts /root/dev/pts || fail "to mount /dev/pts"
# libfabric reads this list of 10 MB in each process, to look for a module that is not here. Emulated, that takes long.
mount -o bind /dev/null /root/proc/kallsyms || fail "to hide the symbols of the kernel"
# Elsewhere udev makes these.
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr

hostname tokenyard-vm
ip link set lo up
chroot /root /bin/sh -s < /network.sh || fail "to bring the network and its RDMA devices up"

job=/sys/firmware/qemu_fw_cfg/by_name/opt/org.tokenyard/job/raw
cp "$job" /root/run/tokenyard-vm-job || fail "to read the job"
say up
chroot /root /bin/sh /run/tokenyard-vm-job < /dev/null > /dev/vport0p1 2>&1
say "exit $?"
poweroff -f
