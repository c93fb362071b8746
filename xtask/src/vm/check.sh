#!/bin/sh
# Run in the test machine: sh check.sh [COMMAND...]. Checks that the machine itself works: programs of
# perftest exchange data between rxe0 and rxe1, before any code of this repository runs. Then runs the
# command.

passed=0
failed=0
log=/tmp/perftest

sent() {
    cat "/sys/class/infiniband/$1/ports/1/hw_counters/sent_pkts"
}

# Waits until the server listens; perftest's port is 18515, in hexadecimal 4853.
await_server() {
    for _ in $(seq 100); do
        grep -q ':4853 0*:0000 0A' /proc/net/tcp /proc/net/tcp6 && return
        sleep 0.1
    done
    echo "the server did not listen within 10 s"
    return 1
}

talk() {
    : > $log.client
    timeout 120 "$@" -d rxe0 -x 1 -F > $log.server 2>&1 &
    server=$!
    await_server && timeout 120 "$@" -d rxe1 -x 1 -F 127.0.0.1 > $log.client 2>&1 && wait $server && return
    kill $server
    wait $server
    return 1
}

check() {
    before0=$(sent rxe0)
    before1=$(sent rxe1)
    if talk "$@" && [ "$(sent rxe0)" -gt "$before0" ] && [ "$(sent rxe1)" -gt "$before1" ]; then
        passed=$((passed + 1))
        echo "$*: ok"
        grep -A 1 '#bytes' $log.client
    else
        failed=$((failed + 1))
        echo "$*: FAILED; server, then client, then packets sent by rxe0 and rxe1, before and after:"
        cat $log.server $log.client
        echo "$before0 $(sent rxe0), $before1 $(sent rxe1)"
    fi
}

check ib_write_bw -s 65536 -n 100
check ib_atomic_lat -A FETCH_AND_ADD -n 100

[ $failed = 0 ] && result=ok || result=FAILED
echo "test result: $result. $passed passed; $failed failed"
[ $failed = 0 ] || exit 1
[ $# = 0 ] || exec "$@"
