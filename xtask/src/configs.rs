//! Writes the configs of test runs. Configs of plugins that were built here name them by their absolute
//! path. Configs of bad days differ in a few numbers.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A provider of libfabric at the scale-out level, with every capability of the component.
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

/// A transport over the device of the software ConnectX (`standins/hca`).
macro_rules! on_standin {
    ($component:literal) => {
        concat!(
            "[transport.scale_up]\nuse = \"none\"\n\n",
            "[transport.scale_out]\nuse = \"",
            $component,
            "\"\n\n[transport.scale_out.",
            $component,
            "]\ndevice = \"standin0\"\n"
        )
    };
}

/// A config of a built plugin.
struct Template {
    file: &'static str,
    /// The sections of the transports.
    transport: &'static str,
    /// The file, in cargo's target folder.
    library: &'static str,
}

const LIBFABRIC: &str = "debug/libtokenyard_plugin_libfabric.so";
const VERBS: &str = "debug/libtokenyard_plugin_verbs.so";
const FAULTY: &str = "debug/libtokenyard_plugin_faulty.so";

const TEMPLATES: [Template; 10] = [
    Template {
        file: "cpu-plugin.toml",
        transport: "[transport.scale_up]\nuse = \"shm\"\n",
        library: "debug/libtokenyard_plugin_cpu.so",
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
        file: "libfabric-verbs.toml",
        // One device serves all ranks, because rail i of one rank reaches rail i of another.
        transport: concat!(libfabric!("verbs"), "rails = [\"rxe0\"]\n"),
        library: LIBFABRIC,
    },
    Template {
        file: "verbs.toml",
        transport: "[transport.scale_up]\nuse = \"none\"\n\n[transport.scale_out]\nuse = \"verbs\"\n",
        library: VERBS,
    },
    Template { file: "verbs-hca.toml", transport: on_standin!("verbs"), library: VERBS },
    Template {
        file: "ibgda-hca.toml",
        transport: on_standin!("ibgda"),
        library: "debug/libtokenyard_plugin_ibgda.so",
    },
];

/// A config of the `faulty` transport over `shm`.
struct BadDay {
    file: &'static str,
    /// Its keys, except the inner transport.
    keys: &'static str,
    /// The text before the section of the transport.
    rest: &'static str,
    levels: &'static [&'static str],
}

const ONE_DOMAIN: &[&str] = &["scale_up"];

const BAD_DAYS: [BadDay; 4] = [
    BadDay { file: "faulty-1.toml", keys: "seed = 1", rest: "", levels: ONE_DOMAIN },
    BadDay {
        file: "faulty-2.toml",
        keys: "seed = 2\nreorder = 200\nback_pressure = 80\nquiet = 0",
        rest: "",
        levels: ONE_DOMAIN,
    },
    BadDay {
        file: "faulty-3.toml",
        keys: "seed = 3\nreorder = 5\ndelay_us = 300\nquiet = 20",
        rest: "",
        levels: ONE_DOMAIN,
    },
    BadDay {
        file: "faulty-domains.toml",
        keys: "seed = 4\nreorder = 64",
        rest: "[topology]\nuse = \"auto\"\ndomains = 2\n\n",
        levels: &["scale_up", "scale_out"],
    },
];

/// Writes the configs into `target/conformance`.
pub(crate) fn write(target: &Path) -> Result<()> {
    let folder = target.join("conformance");
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let save = |file: &str, text: String| {
        let file = folder.join(file);
        std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        println!("wrote {}", file.display());
        Ok(())
    };
    TEMPLATES.iter().try_for_each(|template| save(template.file, text(template, target)?))?;
    BAD_DAYS.iter().try_for_each(|day| save(day.file, bad_day(day, target)?))
}

fn bad_day(day: &BadDay, target: &Path) -> Result<String> {
    let mut text = format!("[kernels]\nuse = \"cpu\"\n\n{}", day.rest);
    for level in day.levels {
        text.push_str(&format!(
            "[transport.{level}]\nuse = \"faulty\"\n[transport.{level}.faulty]\n\
             inner = \"shm\"\n{}\n[transport.{level}.faulty.shm]\nload_store = false\n\n",
            day.keys
        ));
    }
    text.push_str(&plugins(FAULTY, target)?);
    Ok(text)
}

fn text(template: &Template, target: &Path) -> Result<String> {
    let plugins = plugins(template.library, target)?;
    Ok(format!("[kernels]\nuse = \"cpu\"\n\n{}\n{plugins}", template.transport))
}

/// The section that names `library`, a file in cargo's target folder.
fn plugins(library: &str, target: &Path) -> Result<String> {
    let library: PathBuf = target.join(library);
    let path = library.to_str().context("find the plugin: its path is not UTF-8")?;
    ensure!(!path.contains(['"', '\\', '\n']), "found path {path}, which TOML would have to quote");
    Ok(format!("[plugins]\npaths = [\"{path}\"]\n"))
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
        for day in &BAD_DAYS {
            let file = folder.path().join("conformance").join(day.file);
            let text = std::fs::read_to_string(file).unwrap();
            assert_eq!(text.matches("use = \"faulty\"").count(), day.levels.len(), "{text}");
            assert!(text.contains(day.keys) && text.contains(day.rest), "{text}");
            let path = folder.path().join(FAULTY);
            assert!(text.contains(&format!("paths = [\"{}\"]", path.display())), "{text}");
        }
    }

    #[test]
    fn a_path_that_toml_would_have_to_quote_is_refused() {
        assert!(text(&TEMPLATES[0], Path::new("/a\"b")).is_err());
    }
}
