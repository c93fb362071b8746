//! Configs that cannot mask losses are refused when a communicator is opened.

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Failed, Trial};
use tokenyard_conformance::moe::exchange;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::Config;

/// The level between domains must declare the capability too.
const BETWEEN_DOMAINS: &str = "[transport.scale_up]\nuse = \"shm\"\n\
     [transport.scale_out]\nuse = \"faulty\"\n\
     [transport.scale_out.faulty]\ninner = \"shm\"\n\
     fault = { kind = \"fail\", rank = 0, at = 1000000 }\n[topology]\ndomains = 2\n";
const FABRIC_SHM: &str = "[transport.scale_up]\nuse = \"none\"\n\
     [transport.scale_out]\nuse = \"libfabric\"\n\
     [transport.scale_out.libfabric]\nprovider = \"shm\"\n";
/// The transport declares `bounded_put`, and its health stays at its first failure.
const BOUNDED_ALONE: &str = "[transport.scale_up]\nuse = \"faulty\"\n\
     [transport.scale_up.faulty]\ninner = \"shm\"\n\
     fault = { kind = \"fail\", rank = 0, at = 1000000 }\n";

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, transport, says| {
        Trial::test(format!("refused/{name}"), move || {
            refuse(transport, says).map_err(|error| Failed::from(format!("{error:#}")))
        })
    };
    vec![
        trial("between_domains", BETWEEN_DOMAINS, "`faulty` does not declare `masking`"),
        trial("libfabric_shm", FABRIC_SHM, "`libfabric` does not declare `masking`"),
        trial("bounded_put_alone", BOUNDED_ALONE, "`faulty` does not declare `masking`"),
    ]
}

fn refuse(transport: &str, says: &str) -> Result<()> {
    let text = format!("[world]\non_failure = \"mask\"\n[kernels]\nuse = \"cpu\"\n{transport}");
    let config = Config::parse(&text, "refused")?;
    let case = Case { ranks: 4, ..Case::default() };
    let opened = in_threads(4, &config, |world| {
        Communicator::open(world, &config, exchange::options(&case)).map(drop)
    })?;
    for result in opened {
        let error = result.err().context("found an open communicator; expected a refusal")?;
        let text = error.to_string();
        ensure!(error.kind() == ErrorKind::Unsupported, "{text}");
        ensure!(text.contains(says) && text.contains("use on_failure = \"stop\""), "{text}");
    }
    Ok(())
}
