#!/bin/sh
# Run in the test machine: sh suite.sh TARGET MASKING LINKS [all], by `cargo xtask vm --suite`. It runs everything
# that needs RDMA, in one boot. After a part that fails, the next still runs; the exit code is then 1. Emulated
# faults are dear, so each kind has a phase or two here, and the others with `all`; so have routings of rows.
# See docs/testing-rdma.md.

target=$1
masking=$2
links=$3
all=$4
failed=0

part() {
    start=$(date +%s)
    echo "--- $*"
    "$@"
    code=$?
    echo "--- exit code $code after $(($(date +%s) - start)) s"
    [ $code = 0 ] || failed=1
}

# The machine itself, before any code of this repository.
part sh xtask/src/vm/check.sh

part "$target/debug/tokenyard" conformance "$target/conformance/verbs.toml" \
    --save "$target/conformance/results/verbs.json" --slow 10 \
    --filter 'l0/*,l1/routing/*.uniform.*,l1/worlds/*,l2/dispatches_in_flight/*' \
    --filter 'l3/killed/dispatch_receive'
[ -z "$all" ] || part "$target/debug/tokenyard" conformance "$target/conformance/verbs.toml" --slow 10 \
    --filter '*ed/bootstrap,*ed/connect,*ed/between_operations,*ed/dispatch_send' \
    --filter 'l3/stopped/dispatch_receive,*ed/combine_send,*ed/combine_receive,l1/routing/*'

# The reason for the variable: backends/libfabric/docs.md.
part env FI_UNIVERSE_SIZE=16 "$target/debug/tokenyard" conformance \
    "$target/conformance/libfabric-verbs.toml" --filter 'l0/*,l1/routing/*.uniform.*' --slow 10 \
    --expected xtask/src/vm/expected.toml \
    --save "$target/conformance/results/libfabric-verbs.json"
[ -z "$all" ] || part env FI_UNIVERSE_SIZE=16 "$target/debug/tokenyard" conformance \
    "$target/conformance/libfabric-verbs.toml" --filter 'l1/routing/*' --slow 10

# Checks that the benchmark measures; its figures on an emulated machine prove nothing.
part "$target/debug/tokenyard" bench link "$target/conformance/verbs.toml" \
    --samples 1 --tokens 64

# Ranks are lost, and the others go on. Then the link of a rank is cut: last, because it changes the machine.
if [ -n "$all" ]; then
    part "$masking" --verbs
    part "$links"
else
    part "$masking" --verbs --skip killed/entered --skip killed/dispatch_receive
    part "$links" --skip /bootstrap --skip /connect --skip /between_operations --skip _send
fi

exit $failed
