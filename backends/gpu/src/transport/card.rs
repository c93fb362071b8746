//! The card that a rank sends before its memory crosses: the GPU that it drives.

use serde::{Deserialize, Serialize};
use tokenyard_core::fd_exchange::Endpoint;
use tokenyard_core::wire::Wire;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::driver::{Device, Reach, Uuid};
use crate::platform::Names;

const WIRE: Wire = Wire { operation: "read endpoint", magic: *b"TYGP", version: 1 };

/// A rank's GPU, and how to reach the rank. Crosses the bootstrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Card {
    pub(super) device: Uuid,
    pub(super) endpoint: Endpoint,
}

impl Card {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        WIRE.write(&self)
    }

    /// Reads the card of a peer.
    ///
    /// # Errors
    /// `Protocol` for bytes of another form.
    pub(super) fn parse(data: &[u8]) -> Result<Self> {
        WIRE.read(data)
    }

    /// Whether the rank that drives `mine` can work with this one.
    ///
    /// # Errors
    /// `Unavailable`: the GPU is out of reach; or it is the same one, and `shares` is false.
    pub(super) fn check(&self, mine: Device, shares: bool) -> Result<()> {
        if mine.uuid()? == self.device {
            return if shares {
                Ok(())
            } else {
                Err(same_device(mine.ordinal, &mine.platform.names))
            };
        }
        // If the device is not visible here, its access cannot be queried; the mapping of its
        // memory will show it.
        match mine.with_uuid(self.device)? {
            Some(other) => reachable(mine, other, mine.reach(other)?),
            None => Ok(()),
        }
    }
}

fn same_device(ordinal: i32, names: &Names) -> Error {
    let message = format!("two ranks drive one GPU (here device {ordinal}); expected one each");
    Error::new(ErrorKind::Unavailable, "connect", message).with_fix(format!(
        "see the ranks' local indices and {}; to share a GPU, slowly, name it by `device` in \
         [transport.scale_up.{}] and {}",
        names.see_devices,
        names.link,
        names.table()
    ))
}

/// Whether signals and rows can cross.
pub(super) fn reachable(mine: Device, other: Device, reach: Reach) -> Result<()> {
    check_reach([mine.ordinal, other.ordinal], reach)
        .map_err(|error| error.with_fix(format!("see {}", mine.platform.names.see_access)))
}

fn check_reach([mine, other]: [i32; 2], reach: Reach) -> Result<()> {
    let (found, expected) = match reach {
        Reach::Whole => return Ok(()),
        Reach::WithoutAtomics => ("loads and stores but no atomics", "both"),
        Reach::Nothing => ("no access", "peer access"),
    };
    let message =
        format!("found {found} from device {mine} to device {other}; expected {expected}");
    Err(Error::new(ErrorKind::Unavailable, "reach peer", message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::tests::NAMES;

    #[test]
    fn bytes_of_any_other_length_are_refused() {
        for bytes in [0, 15, 16, 17, 51, 53] {
            let error = Card::parse(&vec![1; bytes]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{bytes} bytes");
        }
    }

    #[test]
    fn a_link_that_cannot_add_is_named_with_both_devices() {
        assert!(check_reach([0, 1], Reach::Whole).is_ok());
        let text = check_reach([0, 1], Reach::WithoutAtomics).unwrap_err().to_string();
        assert!(text.contains("no atomics from device 0 to device 1"), "{text}");
        let text = check_reach([2, 3], Reach::Nothing).unwrap_err().to_string();
        assert!(text.contains("no access from device 2 to device 3"), "{text}");
    }

    #[test]
    fn ranks_that_share_a_gpu_learn_how_to_say_that_they_mean_it() {
        let text = same_device(0, &NAMES).to_string();
        assert!(text.contains("device 0") && text.contains("[kernels.kernels]"), "{text}");
    }
}
