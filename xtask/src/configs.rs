//! Writes the configs of plugins that were built here: a config names a plugin by its absolute
//! path, so these cannot be checked in.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A config of a built plugin.
struct Template {
    file: &'static str,
    /// The scale-up transport.
    transport: &'static str,
    /// Below cargo's target folder.
    library: &'static str,
}

const TEMPLATES: [Template; 3] = [
    Template {
        file: "cpu-plugin.toml",
        transport: "shm",
        library: "release/libtokenyard_plugin_cpu.so",
    },
    Template {
        file: "example-c.toml",
        transport: "example_c",
        library: "example-c/libtokenyard_example_c.so",
    },
    Template {
        file: "example-cpp.toml",
        transport: "example_c",
        library: "example-c/libtokenyard_example_cpp.so",
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
        "[kernels]\nuse = \"cpu\"\n\n[transport.scale_up]\nuse = \"{}\"\n\n\
         [plugins]\npaths = [\"{path}\"]\n",
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
            assert!(text.contains(&format!("use = \"{}\"", template.transport)), "{text}");
            let path = folder.path().join(template.library);
            assert!(text.contains(&format!("paths = [\"{}\"]", path.display())), "{text}");
        }
    }

    #[test]
    fn a_path_that_toml_would_have_to_quote_is_refused() {
        assert!(text(&TEMPLATES[0], Path::new("/a\"b")).is_err());
    }
}
