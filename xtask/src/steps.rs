//! The steps of `cargo xtask test`, as data. To add one, add it to [`STEPS`].

use crate::needs::Need;
use crate::step::{Cmd, Lane, Quick, Step, cmd};

const GCC: Need = Need::Package { program: "gcc", package: "gcc" };
const GXX: Need = Need::Package { program: "g++", package: "g++" };
const IP: Need = Need::Package { program: "ip", package: "iproute2" };
const OPEN_MPI: Need = Need::Package { program: "mpirun.openmpi", package: "openmpi-bin" };
const MPICH: Need = Need::Package { program: "mpirun.mpich", package: "mpich" };
const PIP: Need = Need::Package { program: "pip3", package: "python3-pip" };
const PYTHON: Need = Need::Package { program: "python3", package: "python3" };
const STRIP: Need = Need::Package { program: "strip", package: "binutils" };
const RUSTFMT: Need = Need::Program { program: "cargo-fmt", fix: "rustup component add rustfmt" };
const CLIPPY: Need = Need::Program { program: "cargo-clippy", fix: "rustup component add clippy" };
const EXAMPLE_C: Need =
    Need::File { path: "plugins/example-c/shm.c", fix: "git checkout plugins/example-c" };

const FABRIC_HEADERS: Need =
    Need::PackageFile { path: "/usr/include/rdma/fabric.h", package: "libfabric-dev" };
const VERBS_HEADERS: Need =
    Need::PackageFile { path: "/usr/include/infiniband/verbs.h", package: "libibverbs-dev" };
const MLX5: Need =
    Need::PackageFile { path: "/etc/libibverbs.d/mlx5.driver", package: "ibverbs-providers" };
const FI_INFO: Need = Need::Package { program: "fi_info", package: "libfabric-bin" };
/// The needs of `cargo xtask vm`.
pub(crate) const VM_NEEDS: &[Need] = &[
    Need::Package { program: "qemu-system-x86_64", package: "qemu-system-x86" },
    Need::Package { program: "busybox", package: "busybox-static" },
    Need::Package { program: "cpio", package: "cpio" },
    Need::Package { program: "kmod", package: "kmod" },
    Need::Package { program: "ip", package: "iproute2" },
    Need::Package { program: "setpriv", package: "util-linux" },
    Need::Package { program: "ib_write_bw", package: "perftest" },
    FI_INFO,
    Need::PackageFile { path: "/etc/libibverbs.d/rxe.driver", package: "ibverbs-providers" },
    Need::Program { program: "apt-get", fix: "this step takes its kernel from Debian's archive" },
];

pub(crate) const STEPS: &[Step] = &[
    Step {
        name: "quick",
        about: "unit tests of every crate; the transport alone and routing over shared memory",
        after: &[],
        needs: &[GCC, FABRIC_HEADERS, VERBS_HEADERS],
        lane: Lane::Tests,
        quick: Quick::Only,
        commands: &[
            // Cargo builds a package's programs for its integration tests only. This small one stands for all.
            cmd("{xtask} unit --lib --bins --test version"),
            cmd("{target}/debug/tokenyard conformance configs/cpu.toml \
                 --filter l0/*,l1/routing/*,l1/worlds/*,l3/killed/dispatch_receive"),
        ],
    },
    Step {
        name: "fmt",
        about: "the code is formatted",
        after: &[],
        needs: &[RUSTFMT],
        lane: Lane::Beside,
        quick: Quick::Too,
        commands: &[cmd("cargo fmt --all --check")],
    },
    Step {
        name: "header",
        about: "the checked-in C header matches the ABI crate and compiles as C and C++",
        after: &[],
        needs: &[GCC, GXX],
        lane: Lane::Beside,
        quick: Quick::Too,
        commands: &[
            cmd("{xtask} header --check"),
            cmd("gcc -x c -std=c11 -pedantic -Wall -Wextra -Werror -fsyntax-only \
                 abi/include/tokenyard_plugin.h"),
            cmd("g++ -x c++ -std=c++17 -pedantic -Wall -Wextra -Werror -fsyntax-only \
                 abi/include/tokenyard_plugin.h"),
        ],
    },
    Step {
        name: "c-plugin",
        about: "the example plugins build, the first as C and as C++",
        after: &["header"],
        needs: &[GCC, GXX, EXAMPLE_C],
        lane: Lane::Beside,
        quick: Quick::Too,
        commands: &[
            cmd("mkdir -p {target}/example-c"),
            cmd("gcc -Wall -Wextra -Werror -std=c11 -shared -fPIC -Iabi/include \
                 plugins/example-c/shm.c -o {target}/example-c/libtokenyard_example_c.so"),
            cmd("g++ -Wall -Wextra -Werror -std=c++17 -shared -fPIC -Iabi/include \
                 plugins/example-c/shm.c -o {target}/example-c/libtokenyard_example_cpp.so"),
            cmd(
                "gcc -Wall -Wextra -Werror -std=c11 -shared -fPIC -fvisibility=hidden -pthread -Iabi/include \
                 plugins/example-c/sockets.c plugins/example-c/sockets_io.c \
                 -o {target}/example-c/libtokenyard_example_sockets.so",
            ),
        ],
    },
    Step {
        name: "build",
        about: "programs, plugins and tests, built at once with the features of the whole workspace",
        after: &[],
        needs: &[GCC, FABRIC_HEADERS, VERBS_HEADERS],
        lane: Lane::Tests,
        quick: Quick::No,
        // A build of one package would rebuild the crates that it shares with the others: later steps name
        // the workspace too.
        commands: &[
            // One command: with and without tests, cargo unites other features.
            cmd("cargo build {workspace} --lib --bins --tests --examples"),
        ],
    },
    Step {
        name: "unit",
        about: "unit, integration and documentation tests of every crate",
        after: &["build"],
        needs: &[GCC, FABRIC_HEADERS, VERBS_HEADERS, FI_INFO],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[cmd("{xtask} unit")],
    },
    Step {
        name: "xtask",
        about: "tests of this tool",
        after: &[],
        needs: &[],
        lane: Lane::Tests,
        quick: Quick::Too,
        commands: &[cmd(
            "cargo test --package xtask --package tokenyard-abi-header --no-fail-fast",
        )],
    },
    Step {
        name: "clippy",
        about: "no lint complains",
        after: &[],
        needs: &[CLIPPY],
        lane: Lane::Beside,
        quick: Quick::Too,
        // It shares a target folder of its own with `doc`. In the common one it would hold cargo's lock,
        // and tests that build plugins would wait for it.
        commands: &[
            cmd(
                "cargo clippy --target-dir {target}/check --workspace --features tokenyard-cli/full \
                 --all-targets -- -D warnings",
            ),
            // Targets that `--all-targets` and `cargo test` leave out.
            cmd(
                "cargo clippy --target-dir {target}/check --workspace --features tokenyard-cli/full \
                 --test hosts --test mpirun --test links -- -D warnings",
            ),
            // The program that the README's first command builds.
            cmd("cargo clippy --target-dir {target}/check --package tokenyard-cli -- -D warnings"),
        ],
    },
    Step {
        name: "doc",
        about: "the API documentation builds and its links hold",
        after: &[],
        needs: &[],
        lane: Lane::Beside,
        quick: Quick::No,
        commands: &[Cmd {
            env: &[("RUSTDOCFLAGS", "-D warnings")],
            line: "cargo doc --target-dir {target}/check --workspace --features tokenyard-cli/full --no-deps",
        }],
    },
    Step {
        name: "site",
        about: "the site of the documentation is made, and each link of a page leads somewhere",
        after: &["doc"],
        needs: &[PIP, PYTHON],
        lane: Lane::Beside,
        quick: Quick::No,
        commands: &[
            cmd("pip3 install --quiet --upgrade --target {target}/site-tools \
                 --requirement docs/site/requirements.txt"),
            cmd("env PYTHONPATH={target}/site-tools python3 docs/site/build.py {target}/site \
                 --api {target}/check/doc"),
        ],
    },
    Step {
        name: "cuda-compile",
        about: "CUDA kernels compile for sm_80, sm_90a and sm_100a without a GPU; registers; nvcc; NCCL's headers",
        // The step `build` builds the program.
        after: &["build"],
        needs: &[PIP, GXX],
        lane: Lane::Beside,
        quick: Quick::No,
        commands: &[
            cmd("pip3 install --quiet --upgrade --target {target}/cuda-compilers \
                 nvidia-cuda-nvrtc==13.0.* nvidia-cuda-nvcc==13.0.* nvidia-cuda-crt==13.0.* \
                 nvidia-nvvm==13.0.* nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*"),
            cmd("env LD_LIBRARY_PATH={target}/cuda-compilers/nvidia/cu13/lib \
                 cargo test {workspace} --test nvcc -- --include-ignored"),
            cmd("env LD_LIBRARY_PATH={target}/cuda-compilers/nvidia/cu13/lib \
                 {target}/cuda-compilers/nvidia/cu13/bin/nvcc -std=c++17 -arch=sm_80 -cubin -DTY_ROWS_TMA=0 \
                 -Ibackends/gpu/device/common -Ibackends/ibgda/src backends/ibgda/tests/kernel.cu \
                 -o {target}/ibgda.sm_80.cubin"),
            cmd("env LD_LIBRARY_PATH={target}/cuda-compilers/nvidia/cu13/lib \
                 {target}/cuda-compilers/nvidia/cu13/bin/nvcc -std=c++17 -arch=sm_90 -cubin -DTY_ROWS_TMA=0 \
                 -Ibackends/gpu/device/common -Ibackends/ibgda/src backends/ibgda/tests/kernel.cu \
                 -o {target}/ibgda.sm_90.cubin"),
            cmd("python3 sys/nccl/headers.py {target}/nccl 2.31.2 2.32.3"),
            cmd(
                "env NCCL_HEADERS={target}/nccl CUDA_INCLUDE={target}/cuda-compilers/nvidia/cu13/include \
                 cargo test {workspace} --test layout -- --include-ignored",
            ),
            // Three programs with NCCL's headers: the longest command of this step.
            cmd(
                "env NCCL_HEADERS={target}/nccl LD_LIBRARY_PATH={target}/cuda-compilers/nvidia/cu13/lib \
                 cargo test {workspace} --test kernels -- --include-ignored",
            ),
            cmd("env LD_LIBRARY_PATH={target}/cuda-compilers/nvidia/cu13/lib \
                 {target}/debug/examples/compile_cuda"),
            cmd("env LD_LIBRARY_PATH={target}/cuda-compilers/nvidia/cu13/lib \
                 XDG_CACHE_HOME={target}/cuda-cache \
                 {target}/debug/tokenyard warm configs/nvlink.toml --capability 90"),
            cmd("env LD_LIBRARY_PATH={target}/cuda-compilers/nvidia/cu13/lib \
                 XDG_CACHE_HOME={target}/cuda-cache \
                 {target}/debug/tokenyard warm configs/nvlink-proxy.toml --capability 90"),
        ],
    },
    Step {
        name: "rocm-compile",
        about: "every GPU kernel compiles for gfx942 and gfx950, without ROCm; registers, spills, scratch, LDS, sums",
        // The step must not run at the same time as the builds of `build`, whose folder it shares.
        after: &["build"],
        needs: &[PIP],
        lane: Lane::Beside,
        quick: Quick::No,
        commands: &[
            // A clang with AMD's target in one package. Later versions crash on these kernels.
            cmd("pip3 install --quiet --upgrade --target {target}/rocm-compilers ziglang==0.16.0"),
            cmd("env ZIG_GLOBAL_CACHE_DIR={target}/rocm-compilers/cache \
                 {target}/debug/examples/compile_rocm \
                 {target}/rocm-compilers/ziglang/zig"),
            cmd("env ZIG_GLOBAL_CACHE_DIR={target}/rocm-compilers/cache \
                 TOKENYARD_TEST_CLANG={target}/rocm-compilers/ziglang/zig \
                 cargo test --package tokenyard-rocm --test clang -- --include-ignored"),
        ],
    },
    Step {
        name: "model",
        about: "what threads hand to each other holds under every schedule (loom)",
        // It shares what the step `build` has built, except the two crates that it checks; and it is the last of its
        // lane, because cargo's lock keeps the tests' own builds waiting.
        after: &["build"],
        needs: &[],
        lane: Lane::Beside,
        quick: Quick::No,
        commands: &[
            cmd("cargo test --package tokenyard-core --features loom --lib -- \
                 proxy::model gpu_ring::model"),
            cmd("cargo test --package tokenyard-cpu --features loom --lib -- pool::tests::model"),
        ],
    },
    Step {
        name: "conformance",
        about: "the suite, on processes: built-in parts, the loaded plugin, the C and C++ plugins, bad days",
        after: &["build", "c-plugin"],
        needs: &[],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[
            cmd("{xtask} configs"),
            cmd("{target}/debug/tokenyard conformance configs/cpu.toml \
                 --save {target}/conformance/results/cpu.json"),
            // The same code as the one before, on the other side of the ABI: tests that results cross it
            // unchanged.
            cmd("{target}/debug/tokenyard conformance {target}/conformance/cpu-plugin.toml \
                 --filter l0/*,l1/routing/*,l1/worlds/*,l3/killed/dispatch_receive \
                 --save {target}/conformance/results/cpu-plugin.json"),
            cmd("{target}/debug/tokenyard conformance {target}/conformance/example-c.toml \
                 --save {target}/conformance/results/example-c.json"),
            // The same source as the one before.
            cmd("{target}/debug/tokenyard conformance {target}/conformance/example-cpp.toml \
                 --level L0 --save {target}/conformance/results/example-cpp.json"),
            cmd("{target}/debug/tokenyard conformance {target}/conformance/faulty-1.toml \
                 --save {target}/conformance/results/faulty-1.json"),
            cmd("{target}/debug/tokenyard conformance {target}/conformance/faulty-2.toml \
                 --level L0,L1,L2 --save {target}/conformance/results/faulty-2.json"),
            cmd("{target}/debug/tokenyard conformance {target}/conformance/faulty-3.toml \
                 --level L0,L1,L2 --save {target}/conformance/results/faulty-3.json"),
            // Cases for four ranks take eight in two domains.
            cmd("{target}/debug/tokenyard conformance {target}/conformance/faulty-domains.toml \
                 --ranks 8 --save {target}/conformance/results/faulty-domains.json"),
        ],
    },
    Step {
        name: "libfabric",
        about: "the suite over the libfabric plugin: tcp and shm, and the transport alone over udp",
        after: &["conformance"],
        needs: &[FI_INFO],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[
            cmd("{target}/debug/tokenyard conformance {target}/conformance/libfabric-tcp.toml \
                 --save {target}/conformance/results/libfabric-tcp.json"),
            cmd("{target}/debug/tokenyard conformance {target}/conformance/libfabric-shm.toml \
                 --save {target}/conformance/results/libfabric-shm.json"),
            // With its own 128, this provider loses packets and can stop for good: backends/libfabric/docs.md.
            cmd("env FI_OFI_RXD_MAX_UNACKED=64 \
                 {target}/debug/tokenyard conformance {target}/conformance/libfabric-udp.toml \
                 --level L0 --save {target}/conformance/results/libfabric-udp.json"),
        ],
    },
    Step {
        name: "hca",
        about: "the suite over a software ConnectX, under unmodified libibverbs and libmlx5: verbs and ibgda",
        after: &["conformance"],
        needs: &[MLX5],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[
            cmd("rm -rf {target}/hca"),
            cmd("mkdir -p {target}/hca/verbs {target}/hca/ibgda"),
            cmd("env LD_PRELOAD={target}/debug/libtokenyard_hca_preload.so \
                 TOKENYARD_HCA_WORLD={target}/hca/verbs \
                 {target}/debug/tokenyard conformance {target}/conformance/verbs-hca.toml \
                 --filter l0/*,l1/routing/*,l1/worlds/*,l3/killed/dispatch_receive --slow 4 \
                 --save {target}/conformance/results/verbs-hca.json"),
            cmd("env LD_PRELOAD={target}/debug/libtokenyard_hca_preload.so \
                 TOKENYARD_HCA_WORLD={target}/hca/ibgda \
                 {target}/debug/tokenyard conformance {target}/conformance/ibgda-hca.toml \
                 --filter l0/*,l1/routing/*,l1/worlds/*,l3/killed/dispatch_receive --slow 4 \
                 --save {target}/conformance/results/ibgda-hca.json"),
        ],
    },
    Step {
        name: "python",
        about: "the Python packages: built, installed where nothing else is, and tested on the CPU backend",
        // The step `build` builds its plugins.
        after: &["build"],
        needs: &[PIP, PYTHON, STRIP, OPEN_MPI, IP],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[
            // Debian's venv has no pip of its own.
            cmd("rm -rf {target}/python/wheels {target}/python/bare"),
            cmd("mkdir -p python/tokenyard/plugins"),
            cmd(
                "cp {target}/debug/libtokenyard_plugin_gin.so {target}/debug/libtokenyard_plugin_ibgda.so \
                 {target}/debug/libtokenyard_plugin_libfabric.so \
                 {target}/debug/libtokenyard_plugin_verbs.so python/tokenyard/plugins",
            ),
            cmd("strip --strip-unneeded python/tokenyard/plugins/libtokenyard_plugin_gin.so \
                 python/tokenyard/plugins/libtokenyard_plugin_ibgda.so \
                 python/tokenyard/plugins/libtokenyard_plugin_libfabric.so \
                 python/tokenyard/plugins/libtokenyard_plugin_verbs.so"),
            cmd("env CARGO_TARGET_DIR={target} MATURIN_PEP517_ARGS=--profile=dev \
                 pip3 wheel --quiet --no-deps --wheel-dir {target}/python/wheels ./python \
                 ./python/deep_ep"),
            // A later build of the package would include these files.
            cmd("rm -rf python/tokenyard/plugins"),
            cmd("python3 -m venv --without-pip {target}/python/bare"),
            cmd("pip3 --python {target}/python/bare/bin/python install --quiet --no-index \
                 --find-links {target}/python/wheels tokenyard"),
            cmd("{target}/python/bare/bin/python -m tokenyard"),
            cmd("python3 -m venv --without-pip {target}/python/venv"),
            cmd("pip3 --python {target}/python/venv/bin/python install --quiet \
                 --requirement python/tests/requirements.txt"),
            cmd("pip3 --python {target}/python/venv/bin/python install --quiet --no-index \
                 --no-deps --force-reinstall --find-links {target}/python/wheels tokenyard \
                 tokenyard-deep-ep"),
            cmd("{target}/python/venv/bin/ruff check python docs/site"),
            cmd("{target}/python/venv/bin/ruff format --check python docs/site"),
            cmd("{target}/python/venv/bin/mypy --strict python/tokenyard"),
            cmd("{target}/python/venv/bin/pytest --quiet -r s --all-installed \
                 --ignore python/tests/clients python/tests"),
        ],
    },
    Step {
        name: "clients",
        about: "frameworks' own, unmodified code on the drop-in, on the CPU backend",
        // The step `python` installs the packages and torch.
        after: &["python"],
        needs: &[PIP, PYTHON],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[
            cmd("{target}/python/venv/bin/python python/tests/clients/fetch.py {target}/clients"),
            cmd(
                "{target}/python/venv/bin/pytest --quiet -r s --clients {target}/clients --table check \
                 python/tests/clients",
            ),
        ],
    },
    Step {
        name: "vm",
        about: "soft-RoCE, in an emulated machine: the machine itself, then what runs over RDMA",
        after: &["build", "conformance"],
        needs: VM_NEEDS,
        lane: Lane::Tests,
        quick: Quick::No,
        // Emulation is slow, so part of the suite runs: see docs/testing-rdma.md.
        commands: &[cmd("{xtask} vm --suite")],
    },
    Step {
        name: "install",
        about: "program and plugins, installed below an empty prefix, run the configs that come with them",
        // The step `build` builds what it installs.
        after: &["build"],
        needs: &[FI_INFO],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[
            cmd("rm -rf {target}/installed"),
            cmd("{xtask} install --dev {target}/installed"),
            cmd("test -s {target}/installed/include/tokenyard_plugin.h"),
            cmd("{target}/installed/bin/tokenyard run --steps 2 \
                 {target}/installed/share/tokenyard/configs/cpu.toml"),
            cmd("{target}/installed/bin/tokenyard run --steps 2 \
                 {target}/installed/share/tokenyard/configs/domains.toml"),
            cmd("{target}/installed/bin/tokenyard run --steps 2 \
                 {target}/installed/share/tokenyard/configs/libfabric.toml"),
            // Checking the keys of the config needs no device.
            cmd("{target}/installed/bin/tokenyard config check \
                 {target}/installed/share/tokenyard/configs/verbs.toml"),
            cmd("{target}/installed/bin/tokenyard config check \
                 {target}/installed/share/tokenyard/configs/efa.toml"),
            cmd("{target}/installed/bin/tokenyard config check \
                 {target}/installed/share/tokenyard/configs/gin.toml"),
            cmd("{target}/installed/bin/tokenyard config check \
                 {target}/installed/share/tokenyard/configs/ibgda.toml"),
            cmd("{target}/installed/bin/tokenyard config check \
                 {target}/installed/share/tokenyard/configs/nvlink-verbs.toml"),
            cmd("{target}/installed/bin/tokenyard config check \
                 {target}/installed/share/tokenyard/configs/nvlink-efa.toml"),
            cmd("{target}/installed/bin/tokenyard config check \
                 {target}/installed/share/tokenyard/configs/rocm-verbs.toml"),
        ],
    },
    Step {
        name: "results",
        about: "docs/conformance.md agrees with the reports of the suite",
        after: &["conformance", "libfabric", "hca", "vm"],
        needs: &[],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[cmd("{xtask} results --check")],
    },
    Step {
        name: "mpirun",
        about: "jobs that Open MPI's and MPICH's mpirun start: docs/several-nodes.md",
        after: &["build"],
        needs: &[OPEN_MPI, MPICH],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[
            // A target that `cargo test` leaves out.
            cmd("cargo test {workspace} --test mpirun --no-fail-fast"),
        ],
    },
    Step {
        name: "hosts",
        about: "jobs and faults on several hosts, which are network namespaces: docs/testing-hosts.md",
        // The step `build` builds its plugins.
        after: &["build"],
        needs: &[IP, FI_INFO, OPEN_MPI, MPICH],
        lane: Lane::Tests,
        quick: Quick::No,
        commands: &[
            // Targets that `cargo test` leaves out.
            cmd("cargo test {workspace} --test hosts --no-fail-fast"),
            cmd("cargo test {workspace} --test masking -- --ignored"),
        ],
    },
];
