//! One program: sources, options, compiler; and the compiled result.

use std::path::PathBuf;

use sha2::{Digest as _, Sha256};
use tokenyard_core::Result;
use tokenyard_core::abi;

use super::Compiler;
use crate::moe::args;

/// The name under which the kernels include the device API of the level inside a domain.
const UP_DEVICE_API: &str = "up_device_api.cuh";
/// The kernels of an exchange.
const EXCHANGE: SourceFile =
    SourceFile { name: "exchange.cu", text: include_str!("../../device/exchange.cu") };
const HEADERS: [(&str, &str); 42] = [
    ("arch.cuh", include_str!("../../device/common/arch.cuh")),
    ("arch_cuda.cuh", include_str!("../../device/common/arch_cuda.cuh")),
    ("arch_amd.cuh", include_str!("../../device/common/arch_amd.cuh")),
    ("transport.cuh", include_str!("../../device/common/transport.cuh")),
    ("args.cuh", include_str!("../../device/common/args.cuh")),
    ("moe_args.cuh", include_str!("../../device/moe/moe_args.cuh")),
    ("decode_args.cuh", include_str!("../../device/decode/decode_args.cuh")),
    ("copies.cuh", include_str!("../../device/moe/copies.cuh")),
    ("region.cuh", include_str!("../../device/moe/region.cuh")),
    ("types.cuh", include_str!("../../device/common/types.cuh")),
    ("quant.cuh", include_str!("../../device/codec/quant.cuh")),
    ("cast.cuh", include_str!("../../device/codec/cast.cuh")),
    ("entry.cuh", include_str!("../../device/common/entry.cuh")),
    ("route.cuh", include_str!("../../device/moe/route.cuh")),
    ("tables.cuh", include_str!("../../device/moe/tables.cuh")),
    ("metadata.cuh", include_str!("../../device/moe/metadata.cuh")),
    ("tiles.cuh", include_str!("../../device/moe/tiles.cuh")),
    ("pull.cuh", include_str!("../../device/moe/pull.cuh")),
    ("rows.cuh", include_str!("../../device/moe/rows.cuh")),
    ("dispatch.cuh", include_str!("../../device/moe/dispatch.cuh")),
    ("experts.cuh", include_str!("../../device/moe/experts.cuh")),
    ("combine.cuh", include_str!("../../device/moe/combine.cuh")),
    ("puts.cuh", include_str!("../../device/common/puts.cuh")),
    ("arrivals.cuh", include_str!("../../device/moe/arrivals.cuh")),
    ("runs.cuh", include_str!("../../device/moe/runs.cuh")),
    ("put_rows.cuh", include_str!("../../device/moe/put_rows.cuh")),
    ("rank_major.cuh", include_str!("../../device/moe/rank_major.cuh")),
    ("push_combine.cuh", include_str!("../../device/moe/push_combine.cuh")),
    ("fused_plan.cuh", include_str!("../../device/moe/fused_plan.cuh")),
    ("fused_combine.cuh", include_str!("../../device/moe/fused_combine.cuh")),
    ("put_combine.cuh", include_str!("../../device/moe/put_combine.cuh")),
    ("masking.cuh", include_str!("../../device/decode/masking.cuh")),
    ("decode_rows.cuh", include_str!("../../device/decode/decode_rows.cuh")),
    ("decode_sums.cuh", include_str!("../../device/decode/decode_sums.cuh")),
    ("decode.cuh", include_str!("../../device/decode/decode.cuh")),
    ("logfmt.cuh", include_str!("../../device/codec/logfmt.cuh")),
    ("decode_coded.cuh", include_str!("../../device/decode/decode_coded.cuh")),
    ("decode_send.cuh", include_str!("../../device/decode/decode_send.cuh")),
    ("decode_dispatch.cuh", include_str!("../../device/decode/decode_dispatch.cuh")),
    ("decode_rank_major.cuh", include_str!("../../device/decode/decode_rank_major.cuh")),
    ("decode_combine.cuh", include_str!("../../device/decode/decode_combine.cuh")),
    (
        "decode_rank_major_combine.cuh",
        include_str!("../../device/decode/decode_rank_major_combine.cuh"),
    ),
];

/// A GPU architecture that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// NVIDIA's, by compute capability, as major * 10 + minor.
    Sm(u32),
    /// AMD's, by its digits: 0x942 is gfx942.
    Gfx(u32),
}

impl Architecture {
    /// AMD's architecture of a name such as `gfx942` or `gfx942:sramecc+:xnack-`.
    pub fn gfx(name: &str) -> Option<Self> {
        let digits = name.split(':').next()?.strip_prefix("gfx")?;
        u32::from_str_radix(digits, 16).ok().map(Self::Gfx)
    }

    /// The name as the compiler writes it. NVIDIA's include the features of exactly this architecture
    /// from 9.0 on.
    pub fn name(self) -> String {
        match self {
            Self::Sm(capability) => {
                format!("sm_{capability}{}", if capability >= 90 { "a" } else { "" })
            }
            Self::Gfx(digits) => format!("gfx{digits:x}"),
        }
    }
}

/// How rows are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// By bulk copies through shared memory: compute capability 9.0 and later.
    Tma,
    /// By vectors of 16 bytes.
    Vector,
}

/// The compiler of a program, and the devices that it compiles for.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The compiler.
    pub compiler: &'a dyn Compiler,
    /// The devices.
    pub architecture: Architecture,
    /// How rows move there.
    pub rows: Rows,
}

/// A file of source code.
#[derive(Clone, Copy, Debug)]
pub struct SourceFile {
    /// Its name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// The input of a compiler.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file that is compiled.
    pub main: SourceFile,
    /// Names and texts of the files that it may include.
    pub headers: Vec<(String, String)>,
    /// Options, in order.
    pub options: Vec<String>,
    /// Folders that these files include other files from.
    pub include_folders: Vec<PathBuf>,
}

/// The output of a compiler.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code.
    pub image: Vec<u8>,
    /// The assembler's report: registers, spills and shared memory of each kernel.
    pub log: String,
}

/// The device API that the kernels are compiled over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceApiSource<'a> {
    pub(crate) text: &'a str,
    /// Macros, of the form `NAME=VALUE`.
    pub(crate) defines: &'a [String],
    /// Folders that the text includes from. Only a compiler that reads files accepts them.
    pub(crate) include_folders: &'a [PathBuf],
    /// The compiler that it needs.
    pub(crate) compiler: Needed,
    /// The size of the parameters that the transport passes.
    pub(crate) param_bytes: usize,
    /// Whether it puts; otherwise it loads and stores.
    pub(crate) puts: bool,
    /// Whether the host posts the puts of kernels.
    pub(crate) by_host: bool,
}

/// The compiler of a platform that a device API needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needed {
    /// The compiler that is a library, or the other one.
    RunTime,
    /// The compiler that is a program.
    Program,
}

/// The rows that the kernels move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The rows of this rank, straight to their owners.
    Direct,
    /// The same, in one domain, where low-latency operations may go on without ranks. Code for masks takes registers
    /// from every wait, so other programs have none.
    Masked,
    /// Inside one of several domains: the rows that arrive for this domain, grouped by source.
    IntraDomain,
    /// Between domains: the rows of this rank to their domains, in runs where it puts.
    InterDomain,
}

/// The source of kernels beside those of an exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelSource {
    /// The name of its file.
    pub(crate) name: &'static str,
    /// The text of the file.
    pub(crate) text: &'static str,
    /// Bytes of the arguments that its kernels take.
    pub(crate) args_bytes: usize,
}

/// Everything that determines the result.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    source: Source,
}

impl Program {
    /// The kernels of an exchange over a device API.
    pub(crate) fn new(target: Target<'_>, device_api: DeviceApiSource<'_>, role: Role) -> Self {
        let own = [
            format!("-DTY_ARGS_BYTES={}", args::bytes()),
            format!("-DTY_HOST_DEVICE_API_VERSION={}", abi::TY_DEVICE_API_VERSION),
            format!("-DTY_PUTS={}", u32::from(device_api.puts)),
            format!("-DTY_GROUPED={}", u32::from(role == Role::IntraDomain)),
            format!("-DTY_MASKS={}", u32::from(role == Role::Masked)),
            format!("-DTY_RUNS={}", u32::from(role == Role::InterDomain && device_api.puts)),
        ];
        Self::of(EXCHANGE, target, device_api, &own)
    }

    /// Kernels beside those of an exchange, over a device API.
    pub(crate) fn probe(
        target: Target<'_>,
        device_api: DeviceApiSource<'_>,
        kernels: &KernelSource,
    ) -> Self {
        let own = [format!("-DTY_OWN_ARGS_BYTES={}", kernels.args_bytes)];
        let main = SourceFile { name: kernels.name, text: kernels.text };
        Self::of(main, target, device_api, &own)
    }

    /// Kernels that take no device API: they have the addresses of all that they use.
    pub(crate) fn beside(target: Target<'_>, kernels: &KernelSource) -> Self {
        let none = DeviceApiSource {
            text: "",
            defines: &[],
            include_folders: &[],
            compiler: Needed::RunTime,
            param_bytes: 0,
            puts: false,
            by_host: false,
        };
        Self::probe(target, none, kernels)
    }

    fn of(
        main: SourceFile,
        target: Target<'_>,
        device_api: DeviceApiSource<'_>,
        own: &[String],
    ) -> Self {
        let headers = HEADERS.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let Target { compiler, architecture, rows } = target;
        let mut options = compiler.options(architecture);
        options.push(format!("-DTY_ROWS_TMA={}", u32::from(rows == Rows::Tma)));
        options.push(format!("-DTY_UP_PARAM_BYTES={}", device_api.param_bytes));
        options.extend_from_slice(own);
        options.extend(device_api.defines.iter().map(|define| format!("-D{define}")));
        let headers =
            headers.chain([(UP_DEVICE_API.to_owned(), device_api.text.to_owned())]).collect();
        let include_folders = device_api.include_folders.to_vec();
        Self { source: Source { main, headers, options, include_folders } }
    }

    /// Names the result: a hash of every byte of the input, and of the text that identifies the
    /// compiler.
    pub(crate) fn key(&self, compiler: &dyn Compiler) -> Result<String> {
        compiler.load(None)?;
        let (identity, read) = (compiler.identity()?, compiler.files_read(&self.source)?);
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(&identity);
        add(&read);
        add(self.source.main.text);
        self.source.headers.iter().for_each(|(name, text)| {
            add(name);
            add(text);
        });
        self.source.options.iter().for_each(|option| add(option));
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Compiles.
    pub(crate) fn compile(&self, compiler: &dyn Compiler) -> Result<Compiled> {
        compiler.load(None)?;
        compiler.compile(&self.source)
    }
}
