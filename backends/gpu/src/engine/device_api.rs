//! The device API of a transport. It is read with care: it may come from a plugin.

use std::path::PathBuf;

use tokenyard_core::abi;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::compile::{DeviceApiSource, Needed};
use crate::platform::Dialect;

/// A device API that the kernels can be compiled over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceApi {
    source: String,
    /// Macros, of the form `NAME=VALUE`.
    defines: Vec<String>,
    include_folders: Vec<PathBuf>,
    compiler: Needed,
    /// `DeviceApi::Params`, in words of 8 bytes for its alignment.
    pub(crate) params: Vec<u64>,
    param_bytes: usize,
    puts: bool,
    by_host: bool,
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "read device API", message)
        .with_fix("use a transport of this version, for these devices"))
}

/// The elements at an address.
///
/// # Safety
/// `data` is valid for `count` elements, or null.
unsafe fn slice<'a, T>(what: &str, data: *const T, count: usize) -> Result<&'a [T]> {
    match count {
        0 => Ok(&[]),
        _ if data.is_null() => refuse(format!("found {count} of {what} at null")),
        // SAFETY: by this function's contract.
        _ => Ok(unsafe { std::slice::from_raw_parts(data, count) }),
    }
}

/// # Safety
/// The text is valid memory, or null.
unsafe fn text(what: &str, text: &abi::TyStr) -> Result<String> {
    // SAFETY: by this function's contract.
    let bytes = unsafe { slice(what, text.data, text.bytes)? };
    Ok(String::from_utf8_lossy(bytes).into_owned())
}

impl DeviceApi {
    /// Copies the device API that the transport gives.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`], with the reason why the kernels cannot be compiled over it.
    ///
    /// # Safety
    /// Each pointer is null, or valid for as many elements as the device API says.
    pub(crate) unsafe fn read(dialect: &Dialect, device_api: &abi::TyDeviceApi) -> Result<Self> {
        // SAFETY: by this function's contract.
        let (without, bytes) = unsafe {
            (
                Self::without_params(dialect, device_api)?,
                slice("bytes of parameters", device_api.params, device_api.param_bytes)?,
            )
        };
        let word = |some: &[u8]| {
            let mut word = [0; 8];
            word[..some.len()].copy_from_slice(some);
            u64::from_ne_bytes(word)
        };
        Ok(Self { params: bytes.chunks(8).map(word).collect(), ..without })
    }

    /// Reads a device API without the value of its parameters, for callers that only compile.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Safety
    /// As [`read`](Self::read).
    pub(crate) unsafe fn without_params(
        dialect: &Dialect,
        device_api: &abi::TyDeviceApi,
    ) -> Result<Self> {
        let wanted = (abi::TY_DEVICE_API_VERSION, dialect.code);
        let [library, program] = dialect.compilers;
        let found = (device_api.version, device_api.dialect);
        let compiler = match device_api.compiler {
            found if found == library.0 && device_api.include_folder_count == 0 => {
                Some(Needed::RunTime)
            }
            found if found == program.0 => Some(Needed::Program),
            _ => None,
        };
        let (true, Some(compiler)) = (found == wanted, compiler) else {
            return refuse(format!(
                "found version {}, dialect {}, compiler {} with {} include folders; expected {}, {} ({}), \
                 {} ({}) with none or {} ({})",
                found.0,
                found.1,
                device_api.compiler,
                device_api.include_folder_count,
                wanted.0,
                dialect.name,
                wanted.1,
                library.1,
                library.0,
                program.1,
                program.0,
            ));
        };
        if device_api.param_bytes == 0 || device_api.param_alignment > 8 {
            return refuse(format!(
                "found {} bytes of parameters aligned to {}; expected some, aligned to at most 8",
                device_api.param_bytes, device_api.param_alignment
            ));
        }
        // SAFETY: by this function's contract.
        let (source, defines, folders) = unsafe {
            (
                text("bytes of source", &device_api.source)?,
                slice("defines", device_api.defines, device_api.define_count)?,
                slice(
                    "include folders",
                    device_api.include_folders,
                    device_api.include_folder_count,
                )?,
            )
        };
        if source.is_empty() {
            return refuse("found no source; expected that of `struct DeviceApi`".to_owned());
        }
        // SAFETY: by this function's contract.
        let define = |text_of: &abi::TyStr| unsafe { text("bytes of a define", text_of) };
        let defines = defines.iter().map(define).collect::<Result<_>>()?;
        let folder = |text_of: &abi::TyStr| {
            // SAFETY: by this function's contract.
            unsafe { text("bytes of an include folder", text_of) }.map(PathBuf::from)
        };
        let include_folders = folders.iter().map(folder).collect::<Result<_>>()?;
        Ok(Self {
            source,
            defines,
            include_folders,
            compiler,
            params: Vec::new(),
            param_bytes: device_api.param_bytes,
            puts: device_api.flags & abi::TY_DEVICE_API_LOAD_STORE == 0,
            by_host: false,
        })
    }

    /// Checks that the device API does what its transport has declared.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with both.
    pub(crate) fn check_puts(&self, puts: bool) -> Result<()> {
        let way = |puts| if puts { "puts" } else { "loads and stores" };
        if self.puts == puts {
            return Ok(());
        }
        let (found, expected) = (way(self.puts), way(puts));
        refuse(format!(
            "found a device API that {found}; its transport declares one that {expected}"
        ))
    }

    /// The device API that posts through the host.
    pub(crate) fn of_proxy(source: &str, params: Vec<u64>) -> Self {
        let param_bytes = 8 * params.len();
        Self {
            source: source.to_owned(),
            defines: Vec::new(),
            include_folders: Vec::new(),
            compiler: Needed::RunTime,
            params,
            param_bytes,
            puts: true,
            by_host: true,
        }
    }

    /// The input of the compiler.
    pub(crate) fn source(&self) -> DeviceApiSource<'_> {
        DeviceApiSource {
            text: &self.source,
            defines: &self.defines,
            include_folders: &self.include_folders,
            compiler: self.compiler,
            param_bytes: self.param_bytes,
            puts: self.puts,
            by_host: self.by_host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::tests::DIALECT;

    const SOURCE: &str = "struct DeviceApi {};";
    const PARAMS: [u8; 12] = [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0];
    const NO_TEXT: abi::TyStr = abi::TyStr { data: std::ptr::null(), bytes: 0 };

    fn device_api() -> abi::TyDeviceApi {
        abi::TyDeviceApi {
            size: size_of::<abi::TyDeviceApi>(),
            version: abi::TY_DEVICE_API_VERSION,
            dialect: abi::TY_DIALECT_CUDA,
            compiler: abi::TY_COMPILER_NVRTC,
            flags: abi::TY_DEVICE_API_LOAD_STORE,
            source: abi::TyStr { data: SOURCE.as_ptr(), bytes: SOURCE.len() },
            include_folders: std::ptr::null(),
            include_folder_count: 0,
            defines: std::ptr::null(),
            define_count: 0,
            params: PARAMS.as_ptr(),
            param_bytes: PARAMS.len(),
            param_alignment: 4,
        }
    }

    fn refusal(change: impl Fn(&mut abi::TyDeviceApi)) -> String {
        let mut device_api = device_api();
        change(&mut device_api);
        // SAFETY: every pointer is null or points to a constant of its length.
        unsafe { DeviceApi::read(&DIALECT, &device_api) }
            .expect_err("a device API that cannot be used")
            .to_string()
    }

    #[test]
    fn a_device_api_is_copied_whole() {
        let define = [abi::TyStr { data: b"A=1".as_ptr(), bytes: 3 }, NO_TEXT];
        let given = abi::TyDeviceApi { defines: define.as_ptr(), define_count: 2, ..device_api() };
        // SAFETY: the defines live until the end of the test.
        let read = unsafe { DeviceApi::read(&DIALECT, &given) }.unwrap();
        assert_eq!(read.params, [1, 2]);
        let source = read.source();
        assert_eq!((source.text, source.param_bytes), (SOURCE, 12));
        assert_eq!(source.defines, ["A=1", ""]);
    }

    #[test]
    fn null_where_there_should_be_something_is_refused() {
        assert!(refusal(|f| f.params = std::ptr::null()).contains("12 of bytes of parameters"));
        assert!(refusal(|f| f.define_count = 1).contains("1 of defines at null"));
        assert!(refusal(|f| f.source.data = std::ptr::null()).contains("bytes of source at null"));
        assert!(refusal(|f| f.source = NO_TEXT).contains("found no source"));
    }

    #[test]
    fn device_apis_of_other_versions_languages_and_sizes_are_refused() {
        assert!(refusal(|f| f.version += 1).contains("found version 3"));
        assert!(refusal(|f| f.dialect = abi::TY_DIALECT_HIP).contains("dialect 2"));
        assert!(refusal(|f| f.param_bytes = 0).contains("0 bytes of parameters"));
        assert!(refusal(|f| f.param_alignment = 16).contains("aligned to 16"));
    }

    #[test]
    fn a_device_api_that_does_not_do_what_its_transport_declares_is_refused() {
        let given = abi::TyDeviceApi { flags: 0, ..device_api() };
        // SAFETY: every pointer points to a constant of its length.
        let [stores, puts] =
            [device_api(), given].map(|g| unsafe { DeviceApi::read(&DIALECT, &g) }.unwrap());
        assert!(stores.check_puts(false).is_ok() && puts.check_puts(true).is_ok());
        let error = puts.check_puts(false).unwrap_err().to_string();
        assert!(error.contains("found a device API that puts"), "{error}");
        assert!(error.contains("declares one that loads and stores"), "{error}");
    }

    #[test]
    fn the_contract_in_the_header_is_that_of_the_abi() {
        let header = include_str!("../../device/common/transport.cuh");
        let line = format!("#define TY_DEVICE_API_VERSION {}\n", abi::TY_DEVICE_API_VERSION);
        assert!(header.contains(&line));
    }
}
