//! Unmodified libibverbs and libmlx5 over the stand-in of the kernel. Each test runs a program of its own
//! under `LD_PRELOAD`. Needs gcc and libibverbs-dev, which depends on ibverbs-providers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod guests;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use libtest_mimic::{Arguments, Failed, Trial};
use tempfile::TempDir;
use tokenyard_hca::Random;
use tokenyard_sys_mlx5::wqe::{BLOCK, Control, InlineData, Local, MOST_BYTES, Remote, Request};

/// The variable that names the guest that this program plays.
const GUEST: &str = "TOKENYARD_HCA_GUEST";
const PROVIDER: &str = "/etc/libibverbs.d/mlx5.driver";

fn main() {
    if let Some(guest) = std::env::var_os(GUEST) {
        return guests::run(guest.to_str().unwrap());
    }
    assert!(
        Path::new(PROVIDER).exists(),
        "{PROVIDER} not found: apt-get install libibverbs-dev ibverbs-providers"
    );
    let trials = [
        ("requests_of_libmlx5_and_of_rust_are_the_same_64_bytes", golden as fn(&World)),
        ("two_processes_write_add_and_send_over_libibverbs", ping),
        ("memory_of_a_gpu_is_reached_by_address_and_by_dmabuf_unless_that_is_missing", gpu_memory),
        ("queues_of_our_own_run_over_devx", |world| {
            let printed = world.guest("devx");
            assert!(printed.contains("standin0: 1000 puts, total 1000"), "{printed}");
        }),
        ("a_thread_of_the_host_rings_for_kernels", |world| {
            let printed = world.guest("rings");
            assert!(printed.contains("standin0: rung 200 times, total 200"), "{printed}");
        }),
        ("queues_of_kernels_take_what_a_kernel_posts_on_a_stand_in_of_a_gpu", |world| {
            let printed = world.guest("kernels");
            assert!(printed.contains("doorbell gpu, queues gpu: 64 rounds"), "{printed}");
            assert!(printed.contains("doorbell cpu, queues cpu: 64 rounds"), "{printed}");
            assert!(printed.contains("completions gpu: 64 rounds"), "{printed}");
            assert!(printed.contains("doorbell gpu: refused"), "{printed}");
        }),
        ("a_request_that_fails_names_queue_pair_and_syndrome", |world| {
            let faults = world.path("faults.toml");
            let plan = "[[faults]]\nkind = \"error\"\nrequest = 2\nsyndrome = 0x15\n";
            std::fs::write(&faults, plan).unwrap();
            let mut command = world.command(&this());
            let command = command.env(GUEST, "failure").env("TOKENYARD_HCA_FAULTS", &faults);
            let printed = success(&world.run(command));
            assert!(printed.contains("syndrome 0x15 (the peer does not answer)"), "{printed}");
        }),
        ("a_driver_that_breaks_a_rule_is_ended_with_a_dump", |world| {
            let output = world.run(world.command(&this()).env(GUEST, "violation"));
            let printed = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{printed}");
            assert!(printed.contains("stand-in of mlx5: rule 3 (Request)"), "{printed}");
        }),
        ("without_a_world_there_is_no_device", |world| {
            let mut command = world.command(&this());
            let output = world.run(command.env(GUEST, "devices").env_remove("TOKENYARD_HCA_WORLD"));
            assert_eq!(String::from_utf8_lossy(&output.stdout), "");
            assert!(world.guest("devices").contains("standin0"));
        }),
    ];
    let trials = trials.map(|(name, test)| {
        Trial::test(name, move || {
            test(&World::new().map_err(Failed::from)?);
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit();
}

fn this() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// A folder for devices that reach each other, and the library.
struct World {
    folder: TempDir,
    library: PathBuf,
}

impl World {
    fn new() -> Result<Self, String> {
        static LIBRARY: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
        let library = LIBRARY.get_or_init(|| {
            let built = tokenyard_testkit::built_plugin("tokenyard-hca-preload");
            assert!(built.is_file(), "{} was not built", built.display());
            built
        });
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        Ok(Self { folder, library: library.clone() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A program under the stand-in.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", &self.library).env("TOKENYARD_HCA_WORLD", self.folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, command: &mut Command) -> Output {
        command.spawn().unwrap().wait_with_output().unwrap()
    }

    /// Runs a guest, which must end well; returns its output.
    fn guest(&self, name: &str) -> String {
        success(&self.run(self.command(&this()).env(GUEST, name)))
    }

    fn compile(&self, source: &str) -> PathBuf {
        self.build("program", source, &["-libverbs", "-lmlx5"])
    }

    fn build(&self, binary: &str, source: &str, options: &[&str]) -> PathBuf {
        let binary = self.path(binary);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
        let mut gcc = Command::new("gcc");
        gcc.args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(&binary).arg(source);
        let compiled = gcc.args(options).output().expect("apt-get install gcc");
        let printed = String::from_utf8_lossy(&compiled.stderr);
        assert!(
            compiled.status.success(),
            "apt-get install libibverbs-dev, if it is that: {printed}"
        );
        binary
    }
}

fn success(output: &Output) -> String {
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {printed}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A request in the terms of libibverbs, with its flags: fence 1, signaled 2, inline 8.
struct Posted {
    request: Request,
    signaled: bool,
    fence: bool,
}

impl Posted {
    fn random(random: &mut Random) -> Self {
        let to = Remote { address: random.bits() & !7, key: random.bits() as u32 };
        let bytes = 1 + random.below(u64::from(MOST_BYTES)) as u32;
        let from = Local { address: random.bits(), key: random.bits() as u32, bytes };
        let data = [random.bits().to_ne_bytes(), random.bits().to_ne_bytes()].concat();
        let length = 1 + random.below(12) as usize;
        let request = match random.below(5) {
            0 => Request::Write { to, from },
            1 => Request::WriteInline { to, data: InlineData::new(&data[..length]).unwrap() },
            2 => Request::WriteImm { to, from, imm: (random.bits() as u32).to_be_bytes() },
            3 => Request::FetchAdd { to, add: random.bits(), sink: Local { bytes: 8, ..from } },
            _ => Request::Read { from: to, to: from },
        };
        Self { request, signaled: random.below(2) == 0, fence: random.below(2) == 0 }
    }

    /// A line for `golden.c`.
    fn line(&self) -> String {
        let none = Local::default();
        let (op, inline, remote, local, imm, add, data) = match self.request {
            Request::Write { to, from } => (0, false, to, from, [0; 4], 0, None),
            Request::WriteImm { to, from, imm } => (1, false, to, from, imm, 0, None),
            Request::WriteInline { to, data } => (0, true, to, none, [0; 4], 0, Some(data)),
            Request::Read { from, to } => (4, false, from, to, [0; 4], 0, None),
            Request::FetchAdd { to, add, sink } => (6, false, to, sink, [0; 4], add, None),
            Request::Nop => panic!("libibverbs posts no such request"),
        };
        let flags = u32::from(self.fence) | u32::from(self.signaled) << 1 | u32::from(inline) << 3;
        let bytes = data.map_or(local.bytes, |data| data.as_slice().len() as u32);
        let mut words = [0_u8; 16];
        if let Some(data) = data {
            words[..data.as_slice().len()].copy_from_slice(data.as_slice());
        }
        let [first, second] =
            [0, 8].map(|at| u64::from_ne_bytes(words[at..at + 8].try_into().unwrap()));
        format!(
            "{op} {flags} {:x} {:x} {:x} {:x} {bytes} {:x} {add:x} {first:x} {second:x}\n",
            remote.address,
            remote.key,
            local.address,
            local.key,
            u32::from_be_bytes(imm)
        )
    }
}

fn golden(world: &World) {
    let program = world.compile("golden.c");
    // The requests name no memory, so the device is not to execute them.
    let faults = world.path("faults.toml");
    std::fs::write(&faults, "[[faults]]\nkind = \"device_stops\"\nrequest = 1\n").unwrap();
    let mut random = Random::new(20);
    let posted: Vec<_> = (0..200).map(|_| Posted::random(&mut random)).collect();
    let mut child = world.command(&program).env("TOKENYARD_HCA_FAULTS", &faults).spawn().unwrap();
    let lines: String = posted.iter().map(Posted::line).collect();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let printed = success(&child.wait_with_output().unwrap());
    let mut lines = printed.lines();
    let qpn = u32::from_str_radix(lines.next().unwrap(), 16).unwrap();
    let mut compared = 0;
    for (index, (posted, line)) in posted.iter().zip(lines).enumerate() {
        let (block, record) = line.split_once(' ').unwrap();
        let (signaled, fence) = (posted.signaled, posted.fence);
        let control = Control { index: index as u16, qpn, signaled, fence };
        let ours: [u8; BLOCK] = posted.request.to_block(control);
        let ours: String = ours.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(ours, block, "request {index}: {:?}", posted.request);
        assert_eq!(record, format!("{:x}", index + 1));
        compared += 1;
    }
    assert_eq!(compared, 200);
}

/// NVIDIA's driver is one of the tests, whose memory only its own copies reach.
fn gpu_memory(world: &World) {
    let driver = world.build("libcuda.so.1", "fake_cuda.c", &["-shared", "-fPIC"]);
    std::os::unix::fs::symlink(driver, world.path("libcuda.so")).unwrap();
    let program = world.compile("gpu_memory.c");
    let run = |command: &mut Command| {
        success(&world.run(command.env("LD_LIBRARY_PATH", world.folder.path())))
    };
    let printed = run(&mut world.command(&program));
    assert!(printed.contains("standin0: memory of a GPU"), "{printed}");
    let mut without = world.command(&program);
    without.arg("lacks").env("TOKENYARD_HCA_LACKS", "peermem,dmabuf,registers");
    assert!(run(&mut without).contains("refused: "));
}

fn ping(world: &World) {
    let program = world.compile("ping.c");
    let ranks = ["0", "1"]
        .map(|rank| world.command(&program).arg(world.folder.path()).arg(rank).spawn().unwrap());
    for (rank, child) in ranks.into_iter().enumerate() {
        let printed = success(&child.wait_with_output().unwrap());
        assert_eq!(printed, format!("standin0: rank {rank} done\n"));
    }
}
