//! One program: sources, options, compiler; and what comes out of it.

use std::ffi::{CStr, CString, c_char};
use std::os::unix::fs::MetadataExt as _;

use cudarc::nvrtc::sys;
use sha2::{Digest as _, Sha256};
use tokenyard_core::abi;
use tokenyard_core::{Error, ErrorKind, Result};

use super::load;
use crate::kernels::args;
use crate::kernels::proxy_face;
use crate::probe::ProbeArgs;
use crate::transport::nvlink_face;

/// The name under which the kernels include the face of the level inside a domain.
const UP_FACE: &str = "up_face.cuh";
/// The kernels of an exchange, and those that measure a link: name and text.
const EXCHANGE: (&str, &str) = ("exchange.cu", include_str!("../kernels/exchange.cu"));
const PROBE: (&str, &str) = ("probe.cu", include_str!("../probe/probe.cu"));
const HEADERS: [(&str, &str); 20] = [
    ("transport.cuh", include_str!("../../device/transport.cuh")),
    ("args.cuh", include_str!("../kernels/args.cuh")),
    ("region.cuh", include_str!("../kernels/region.cuh")),
    ("types.cuh", include_str!("../kernels/types.cuh")),
    ("cast.cuh", include_str!("../kernels/cast.cuh")),
    ("entry.cuh", include_str!("../kernels/entry.cuh")),
    ("route.cuh", include_str!("../kernels/route.cuh")),
    ("tables.cuh", include_str!("../kernels/tables.cuh")),
    ("sides.cuh", include_str!("../kernels/sides.cuh")),
    ("tiles.cuh", include_str!("../kernels/tiles.cuh")),
    ("bulk.cuh", include_str!("../kernels/bulk.cuh")),
    ("pull.cuh", include_str!("../kernels/pull.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("dispatch.cuh", include_str!("../kernels/dispatch.cuh")),
    ("experts.cuh", include_str!("../kernels/experts.cuh")),
    ("combine.cuh", include_str!("../kernels/combine.cuh")),
    ("puts.cuh", include_str!("../kernels/puts.cuh")),
    ("put_rows.cuh", include_str!("../kernels/put_rows.cuh")),
    ("push_combine.cuh", include_str!("../kernels/push_combine.cuh")),
    ("put_combine.cuh", include_str!("../kernels/put_combine.cuh")),
];

/// A GPU architecture that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Compute capability, as major * 10 + minor.
    pub capability: u32,
}

impl Architecture {
    /// As the compiler writes it, with the features of exactly this architecture from 9.0 on.
    pub fn name(self) -> String {
        format!("sm_{}{}", self.capability, if self.capability >= 90 { "a" } else { "" })
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

/// What the compiler made.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code.
    pub image: Vec<u8>,
    /// What the assembler says: registers, spills and shared memory of each kernel.
    pub log: String,
}

/// The face that the kernels are compiled over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FaceSource<'a> {
    pub(crate) text: &'a str,
    /// Of the form `NAME=VALUE`.
    pub(crate) defines: &'a [String],
    /// The size of the parameters that the transport passes.
    pub(crate) param_bytes: usize,
    /// It puts; else it loads and stores.
    pub(crate) puts: bool,
}

/// A face that this crate has the source of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Up {
    /// Over NVLink, by loads and stores.
    Nvlink,
    /// Through the host, by puts.
    Proxy,
}

impl Up {
    pub(crate) fn source(self) -> FaceSource<'static> {
        match self {
            Self::Nvlink => nvlink_face(),
            Self::Proxy => proxy_face(),
        }
    }
}

/// Whose rows the kernels move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Those of this rank, straight to their owners; or, of several domains, to their domains.
    Direct,
    /// Inside one of several domains: those that came for it, grouped by where they came from.
    Inside,
}

/// Everything that decides what comes out.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    main: (&'static str, &'static str),
    headers: Vec<(String, String)>,
    options: Vec<String>,
}

impl Program {
    /// The kernels of an exchange over a face.
    pub(crate) fn new(
        architecture: Architecture,
        rows: Rows,
        face: FaceSource<'_>,
        role: Role,
    ) -> Self {
        let own = [
            format!("-DTY_ARGS_BYTES={}", args::bytes()),
            format!("-DTY_HOST_FACE_VERSION={}", abi::TY_FACE_VERSION),
            format!("-DTY_PUTS={}", u32::from(face.puts)),
            format!("-DTY_GROUPED={}", u32::from(role == Role::Inside)),
        ];
        Self::of(EXCHANGE, (architecture, rows), face, &own)
    }

    /// The kernels that measure a link, over a face that loads and stores.
    pub(crate) fn probe(architecture: Architecture, rows: Rows, face: FaceSource<'_>) -> Self {
        let own = [format!("-DTY_PROBE_BYTES={}", size_of::<ProbeArgs>())];
        Self::of(PROBE, (architecture, rows), face, &own)
    }

    fn of(
        main: (&'static str, &'static str),
        (architecture, rows): (Architecture, Rows),
        face: FaceSource<'_>,
        own: &[String],
    ) -> Self {
        let headers = HEADERS.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let mut options = vec![
            format!("-arch={}", architecture.name()),
            "-std=c++20".to_owned(),
            "--ptxas-options=-v".to_owned(),
            format!("-DTY_ROWS_TMA={}", u32::from(rows == Rows::Tma)),
            format!("-DTY_UP_PARAM_BYTES={}", face.param_bytes),
        ];
        options.extend_from_slice(own);
        options.extend(face.defines.iter().map(|define| format!("-D{define}")));
        let headers = headers.chain([(UP_FACE.to_owned(), face.text.to_owned())]).collect();
        Self { main, headers, options }
    }

    /// Names what comes out: a hash of every byte that goes in and of what tells the compiler from
    /// others.
    pub(crate) fn key(&self) -> Result<String> {
        let compiler = compiler()?;
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(&compiler);
        add(self.main.1);
        self.headers.iter().for_each(|(name, text)| {
            add(name);
            add(text);
        });
        self.options.iter().for_each(|option| add(option));
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Compiles.
    pub(crate) fn compile(&self) -> Result<Compiled> {
        load()?;
        let texts = |all: &mut dyn Iterator<Item = &str>| -> Result<Vec<CString>> {
            all.map(|text| {
                CString::new(text).map_err(|_| {
                    Error::new(
                        ErrorKind::InvalidInput,
                        "compile kernels",
                        "a source has a zero byte",
                    )
                })
            })
            .collect()
        };
        let names = texts(&mut self.headers.iter().map(|(name, _)| name.as_str()))?;
        let contents = texts(&mut self.headers.iter().map(|(_, text)| text.as_str()))?;
        let options = texts(&mut self.options.iter().map(String::as_str))?;
        let main = texts(&mut [self.main.1, self.main.0].into_iter())?;
        let pointers = |all: &[CString]| all.iter().map(|t| t.as_ptr()).collect::<Vec<_>>();
        let (names_at, contents_at) = (pointers(&names), pointers(&contents));
        let mut raw = std::ptr::null_mut();
        // SAFETY: every text ends with a zero and lives until the end of this function.
        check("read kernels", unsafe {
            sys::nvrtcCreateProgram(
                &mut raw,
                main[0].as_ptr(),
                main[1].as_ptr(),
                names.len() as i32,
                contents_at.as_ptr(),
                names_at.as_ptr(),
            )
        })?;
        let program = Raw(raw);
        let options_at = pointers(&options);
        // SAFETY: a program that lives, and texts as above.
        let status = unsafe {
            sys::nvrtcCompileProgram(program.0, options.len() as i32, options_at.as_ptr())
        };
        let log = program.log()?;
        check("compile kernels", status).map_err(|e| e.with_context("log", &log))?;
        Ok(Compiled { image: program.image()?, log })
    }
}

/// What tells the loaded compiler from others: its version, which many releases share, and the size
/// and time of its file.
fn compiler() -> Result<String> {
    load()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the compiler is loaded; both numbers are ours.
    check("ask compiler", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    let system = |e| Error::system("ask compiler", "its library cannot be looked at", e);
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(system)?;
    let library = library_in(&maps).ok_or_else(|| {
        let message = "found no libnvrtc.so among the files that are mapped; expected it there";
        Error::new(ErrorKind::System, "ask compiler", message)
    })?;
    let file = std::fs::metadata(library).map_err(system)?;
    let (bytes, seconds, nanoseconds) = (file.len(), file.mtime(), file.mtime_nsec());
    Ok(format!("nvrtc {major}.{minor}, {bytes} bytes of {seconds}.{nanoseconds:09}"))
}

/// The path of the compiler's library, in the list of a process's mappings.
fn library_in(maps: &str) -> Option<&str> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|path| &line[path..]))
        .find(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("libnvrtc.so")))
}

/// Compiles the kernels over a face, without a GPU and without the cache: for tests and for who wants
/// to know registers and spills.
///
/// # Errors
/// No compiler, or what it says.
pub fn compile(architecture: Architecture, rows: Rows, up: Up, role: Role) -> Result<Compiled> {
    Program::new(architecture, rows, up.source(), role).compile()
}

/// Compiles the kernels that measure a link over NVLink, as [`compile`] does.
///
/// # Errors
/// No compiler, or what it says.
pub fn compile_probe(architecture: Architecture, rows: Rows) -> Result<Compiled> {
    Program::probe(architecture, rows, nvlink_face()).compile()
}

/// A program of the compiler.
struct Raw(sys::nvrtcProgram);

impl Raw {
    fn log(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: a program that lives.
        check("read log", unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut bytes) })?;
        let mut text = vec![0_u8; bytes];
        // SAFETY: room for as many bytes as the compiler said.
        check("read log", unsafe {
            sys::nvrtcGetProgramLog(self.0, text.as_mut_ptr().cast::<c_char>())
        })?;
        let text = text.strip_suffix(&[0]).unwrap_or(&text);
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    fn image(&self) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a program that was compiled.
        check("read image", unsafe { sys::nvrtcGetCUBINSize(self.0, &mut bytes) })?;
        let mut image = vec![0_u8; bytes];
        // SAFETY: room for as many bytes as the compiler said.
        check("read image", unsafe {
            sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast::<c_char>())
        })?;
        Ok(image)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: made once; the call forgets it.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn check(operation: &'static str, status: sys::nvrtcResult) -> Result<()> {
    if status == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: the compiler is loaded; its texts are static.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(status)) };
    let message = format!("NVRTC says {}", text.to_string_lossy());
    Err(Error::new(ErrorKind::System, operation, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_is_found_among_mapped_files_by_its_name() {
        let maps = "\
7f0000000000-7f0000001000 r--p 00000000 08:01 17  /opt/libnvrtc.so.d/libother.so.1
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
7f0000002000-7f0000003000 r-xp 00001000 08:01 18  /opt/a b/lib/libnvrtc-builtins.so.13.0
7f0000003000-7f0000004000 r-xp 00001000 08:01 19  /opt/a b/lib/libnvrtc.so.13
";
        assert_eq!(library_in(maps), Some("/opt/a b/lib/libnvrtc.so.13"));
        assert_eq!(library_in("7f0000000000-7f0000001000 r--p 00000000 00:00 0 [stack]\n"), None);
    }
}
