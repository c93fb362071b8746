//! Figures of other libraries, as a command line gives them to a plot.

use std::str::FromStr;

use anyhow::{Result, anyhow};

/// A figure of another library for one operation, of a run of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Peer {
    /// The operation as reports name it, such as `dispatch fp8 flat`.
    pub operation: String,
    /// The library.
    pub name: String,
    /// Its time in microseconds.
    pub us: f64,
}

impl FromStr for Peer {
    type Err = anyhow::Error;

    /// From `OPERATION:NAME=MICROSECONDS`.
    fn from_str(text: &str) -> Result<Self> {
        let parts = || {
            let (operation, rest) = text.split_once(':')?;
            let (name, us) = rest.rsplit_once('=')?;
            let us: f64 = us.trim().parse().ok().filter(|us: &f64| us.is_finite() && *us > 0.0)?;
            let [operation, name] = [operation, name].map(|part| part.trim().to_owned());
            Some(Self { operation, name, us })
        };
        parts().filter(|peer| !peer.name.is_empty()).ok_or_else(|| {
            anyhow!(
                "found {text:?}; expected OPERATION:NAME=MICROSECONDS, such as \"dispatch fp8 flat:DeepEP V2=143\""
            )
        })
    }
}
