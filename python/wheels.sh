#!/bin/sh
# Builds the wheels of the Python packages for Linux, with their plugins, on any x86_64 or aarch64 machine:
#
#   python/wheels.sh FOLDER [TARGET...]        TARGET: x86_64-unknown-linux-gnu, aarch64-unknown-linux-gnu
#
# It needs rustup, and from PyPI maturin, ziglang, cargo-zigbuild and pyelftools on the path. zig links against the C
# library of manylinux_2_28; audit.py refuses wheels that need more, or anything of a fabric or of CUDA.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
plugins=$root/python/tokenyard/plugins
built=${CARGO_TARGET_DIR:-$root/target}
export CARGO_PROFILE_RELEASE_STRIP=symbols
trap 'rm -rf "$plugins"' EXIT
cd "$root"
for target in "$@"; do
    rustup target add "$target"
    rm -rf "$plugins"
    mkdir -p "$plugins"
    for plugin in gin ibgda libfabric verbs; do
        cargo zigbuild --release --package "tokenyard-plugin-$plugin" --target "$target.2.28"
        cp "$built/$target/release/libtokenyard_plugin_$plugin.so" "$plugins/"
    done
    maturin build --release --zig --compatibility manylinux_2_28 --target "$target" \
        --manifest-path python/Cargo.toml --out "$folder"
done
python3 "$root/python/audit.py" "$folder"/tokenyard-*.whl
pip3 wheel --quiet --no-deps --wheel-dir "$folder" "$root/python/deep_ep"
ls -l "$folder"
