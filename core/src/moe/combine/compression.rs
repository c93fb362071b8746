//! Combines whose partial rows are encoded.

use crate::communicator::Combine;
use crate::moe::{Compression, DType, Layout, logfmt};
use crate::{Error, ErrorKind, Result};

/// The name in messages, with what a kernel set needs for it.
pub(crate) const LOGFMT10: &str =
    "compression LogFMT-10 (one domain; on GPUs decode = \"low_latency\")";

impl Combine<'_> {
    /// Checks that the rows may be encoded.
    pub(crate) fn check_compression(&self, layout: Layout) -> Result<()> {
        if self.compression == Compression::None {
            return Ok(());
        }
        let (dtype, hidden) = (self.x.dtype(), self.x.cols());
        let found = match layout {
            Layout::Flat | Layout::ExpertMajor { .. } | Layout::RankMajor { .. } => {
                format!("{} rows", layout.name())
            }
            Layout::Packed if self.round_once => {
                "round_once, whose sums travel as float32".to_owned()
            }
            Layout::Packed if dtype != Some(DType::Bf16) => {
                format!("rows of {}", dtype.map_or("an unknown type", DType::name))
            }
            Layout::Packed if !logfmt::takes(hidden) => format!("{hidden} channels"),
            Layout::Packed => return Ok(()),
        };
        let message = format!(
            "compression: found LogFMT-10 of {found}; expected packed rows of bf16 without round_once, whose \
             channels are a multiple of {}",
            logfmt::BLOCK
        );
        Err(Error::new(ErrorKind::InvalidInput, "check arguments", message)
            .with_fix("combine without compression"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::{TensorMut, TensorRef};

    /// The error of a combine of these rows in LogFMT-10, or none.
    fn refused(dtype: DType, hidden: usize, layout: Layout, round_once: bool) -> Option<String> {
        let rows = vec![0; hidden * dtype.bytes()];
        let mut sums = rows.clone();
        let x = TensorRef::from_bytes(&rows, dtype, 1, hidden).unwrap();
        let out = TensorMut::from_bytes(&mut sums, dtype, 1, hidden).unwrap();
        let combine =
            Combine { compression: Compression::LogFmt10, round_once, ..Combine::new(x, out) };
        combine.check_compression(layout).err().map(|error| error.to_string())
    }

    #[test]
    fn rows_that_cannot_be_encoded_are_refused_with_what_was_found() {
        assert_eq!(refused(DType::Bf16, 1536, Layout::Packed, false), None);
        let expert_major = Layout::ExpertMajor { alignment: 1, zero_padding: false };
        for (dtype, hidden, layout, once, found) in [
            (DType::Bf16, 512, Layout::Flat, false, "of flat rows"),
            (DType::Bf16, 512, expert_major, false, "of expert-major rows"),
            (DType::Bf16, 512, Layout::Packed, true, "of round_once"),
            (DType::F16, 512, Layout::Packed, false, "rows of fp16"),
            (DType::F32, 512, Layout::Packed, false, "rows of fp32"),
            (DType::Bf16, 768, Layout::Packed, false, "768 channels"),
        ] {
            let text = refused(dtype, hidden, layout, once).unwrap();
            assert!(text.contains(found) && text.contains("a multiple of 512"), "{text}");
        }
    }
}
