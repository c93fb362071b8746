//! Writes the configs of plugins that were built here: a config names a plugin by its absolute
//! path, so these cannot be checked in.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A provider of libfabric at the scale-out level, with all that the part can do.
macro_rules! libfabric {
    ($provider:literal) => {
        concat!(
            "[transport.scale_up]\nuse = \"none\"\n\n",
            "[transport.scale_out]\nuse = \"libfabric\"\n\n",
            "[transport.scale_out.libfabric]\nget = true\nprovider = \"",
            $provider,
            "\"\n"
        )
    };
}

/// A config of a built plugin.
struct Template {
    file: &'static str,
    /// The sections of the transports.
    transport: &'static str,
    /// Below cargo's target folder.
    library: &'static str,
}

const LIBFABRIC: &str = "release/libtokenyard_plugin_libfabric.so";

const TEMPLATES: [Template; 7] = [
    Template {
        file: "cpu-plugin.toml",
        transport: "[transport.scale_up]\nuse = \"shm\"\n",
        library: "release/libtokenyard_plugin_cpu.so",
    },
    Template {
        file: "example-c.toml",
        transport: "[transport.scale_up]\nuse = \"example_c\"\n",
        library: "example-c/libtokenyard_example_c.so",
    },
    Template {
        file: "example-cpp.toml",
        transport: "[transport.scale_up]\nuse = \"example_c\"\n",
        library: "example-c/libtokenyard_example_cpp.so",
    },
    Template { file: "libfabric-tcp.toml", transport: libfabric!("tcp"), library: LIBFABRIC },
    Template { file: "libfabric-shm.toml", transport: libfabric!("shm"), library: LIBFABRIC },
    Template { file: "libfabric-udp.toml", transport: libfabric!("udp"), library: LIBFABRIC },
    Template {
        file: "verbs.toml",
        transport: "[transport.scale_up]\nuse = \"none\"\n\n[transport.scale_out]\nuse = \"verbs\"\n",
        library: "release/libtokenyard_plugin_verbs.so",
    },
];

/// Writes a config for each plugin of `target` into `target/conformance`.
pub(crate) fn write(target: &Path) -> Result<()> {
    let folder = target.join("conformance");
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    for template in &TEMPLATES {
        let file = folder.join(template.file);
        std::fs::write(&file, text(template, target)?)
            .with_context(|| format!("write {}", file.display()))?;
        println!("wrote {}", file.display());
    }
    Ok(())
}

fn text(template: &Template, target: &Path) -> Result<String> {
    let library: PathBuf = target.join(template.library);
    let path = library.to_str().context("find the plugin: its path is not UTF-8")?;
    ensure!(!path.contains(['"', '\\', '\n']), "found path {path}, which TOML would have to quote");
    Ok(format!(
        "[kernels]\nuse = \"cpu\"\n\n{}\n[plugins]\npaths = [\"{path}\"]\n",
        template.transport
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_config_names_its_transport_and_an_absolute_path() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        for template in &TEMPLATES {
            let text =
                std::fs::read_to_string(folder.path().join("conformance").join(template.file))
                    .unwrap();
            assert!(text.contains(template.transport), "{text}");
            let path = folder.path().join(template.library);
            assert!(text.contains(&format!("paths = [\"{}\"]", path.display())), "{text}");
        }
    }

    #[test]
    fn a_path_that_toml_would_have_to_quote_is_refused() {
        assert!(text(&TEMPLATES[0], Path::new("/a\"b")).is_err());
    }
}
