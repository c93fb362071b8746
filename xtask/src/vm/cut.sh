#!/bin/sh
# Run in the test machine: sh cut.sh TOKENYARD CONFIG. Takes the link of one rank's device down while
# ranks exchange over `verbs`. The ranks still hear each other over the loopback device, so the device
# must tell: all ranks end in time, and the error names the link.

tokenyard=$1
config=/tmp/cut.toml
log=/tmp/cut.log
passed=0
failed=0
# Seconds: of the world, and until the ranks must have ended.
deadline=15
limit=60

{
    echo "[world]"
    echo "deadline_ms = ${deadline}000"
    cat "$2"
} > $config

sent() {
    cat "/sys/class/infiniband/$1/ports/1/hw_counters/sent_pkts"
}

# Until so many packets more have been sent, which is in the middle of the exchanges.
await_traffic() {
    goal=$(($(sent "$1") + 400))
    for _ in $(seq 600); do
        [ "$(sent "$1")" -gt $goal ] && return
        kill -0 $job 2> /dev/null || break
        sleep 0.1
    done
    echo "the ranks did not exchange within 60 s"
    return 1
}

# The first seconds after $start in which the job is gone.
await_end() {
    while kill -0 $job 2> /dev/null; do
        [ $(($(date +%s) - start)) -gt $limit ] && return 1
        sleep 0.2
    done
}

cut() {
    "$tokenyard" run $config --ranks 3 --steps 1000000 --tokens 8 --hidden 64 --experts 6 --topk 2 \
        > $log 2>&1 &
    job=$!
    await_traffic "rxe$1" || return 1
    ip link set "veth$1" down
    start=$(date +%s)
    await_end || { echo "the ranks did not end within $limit s"; return 1; }
    took=$(($(date +%s) - start))
    wait $job
    code=$?
    [ $code = 2 ] || { echo "exit code $code, expected 2"; return 1; }
    grep -q "rxe.* port 1 gid .*queue pair" $log || { echo "no error names the link"; return 1; }
    echo "link of rank $1 down: all ranks ended after $took s"
    # The device told, or nothing came any more.
    grep -m 1 -o -e "execute command: [^[]*" -e "did not finish phase [^;]*" $log
}

for rank in 1 0; do
    if cut $rank; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "link of rank $rank down: FAILED; the ranks said:"
        tail -n 40 $log
        kill $job 2> /dev/null
        wait $job
    fi
    ip link set "veth$rank" up
done

[ $failed = 0 ] && result=ok || result=FAILED
echo "test result: $result. $passed passed; $failed failed"
[ $failed = 0 ]
