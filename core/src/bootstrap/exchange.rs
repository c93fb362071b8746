//! A rendezvous through an all-gather of the caller.

use std::net::IpAddr;

use super::handshake::Credentials;
use super::identity::{ExchangeFn, RankId};
use super::interface::Local;
use super::rendezvous::{Address, NextStep, OPERATION, Target, listen_anywhere};
use super::secret::Secret;
use super::text::clean;
use super::world::INTERFACE_VARIABLE;
use crate::machine::host_name;
use crate::{Error, ErrorKind, Result};

/// Every rank gives its host name; rank 0 adds its address and the secret, or the reason why it has no
/// address.
pub(super) fn enter_by_exchange(
    place: RankId,
    mut exchange: Box<ExchangeFn>,
    credentials: Credentials,
    local: Local,
) -> Result<NextStep> {
    let fresh = credentials.secret.is_none();
    let secret = if fresh && place.rank == 0 { Secret::generate()? } else { credentials.secret };
    let mut mine = host_name();
    // An error of rank 0 must reach the other ranks, which wait in the exchange.
    let bound = (place.rank == 0).then(|| listen_anywhere(local.own(), &secret));
    match &bound {
        Some(Ok((_, address))) => {
            let spread = if fresh { secret.reveal().unwrap_or_default() } else { "" };
            mine.push_str(&format!("\n{}\n{spread}", address.encode()));
        }
        Some(Err(error)) => mine.push_str(&format!("\n!{}", clean(&error.to_string(), 400))),
        None => {}
    }
    let all = exchange(mine.as_bytes()).map_err(|why| {
        Error::new(ErrorKind::System, OPERATION, format!("the caller's exchange failed: {why}"))
    })?;
    let bound = bound.transpose()?;
    let exchanged = Exchanged::read(&all, place.ranks)?;
    exchanged.check_hosts()?;
    match bound {
        Some((listener, address)) => {
            let credentials = Credentials { secret, job: address.job };
            Ok(NextStep::Hub { listener, credentials, notice: None })
        }
        None => {
            let secret = if fresh { exchanged.secret } else { secret };
            let Address { host, port, job } = exchanged.address;
            let credentials = Credentials { secret, job };
            Ok(NextStep::Spoke { target: Target::Address { host, port }, credentials, local })
        }
    }
}

/// The result of a caller's exchange.
struct Exchanged {
    hosts: Vec<String>,
    address: Address,
    secret: Secret,
}

impl Exchanged {
    fn read(all: &[Vec<u8>], ranks: u32) -> Result<Self> {
        let refuse = |message: String| {
            Error::new(ErrorKind::Protocol, OPERATION, message)
                .with_fix("let the exchange return the bytes of every rank unchanged, by rank")
        };
        if all.len() != ranks as usize {
            let found = all.len();
            return Err(refuse(format!("the exchange gave {found} items, expected {ranks}")));
        }
        let texts: Vec<_> = all.iter().map(|bytes| String::from_utf8_lossy(bytes)).collect();
        let hosts =
            texts.iter().map(|text| clean(text.lines().next().unwrap_or(""), 255)).collect();
        let mut lines = texts.first().map_or("", |text| text).lines().skip(1);
        let address = lines.next().ok_or_else(|| {
            refuse("the exchange gave no address for rank 0, expected one".into())
        })?;
        if let Some(why) = address.strip_prefix('!') {
            let message = format!("rank 0 cannot listen: {}", clean(why, 400));
            return Err(Error::new(ErrorKind::PeerLost, OPERATION, message));
        }
        let secret = match lines.next() {
            None | Some("") => Secret::none(),
            Some(text) => Secret::from_text(text)?,
        };
        Ok(Self { hosts, address: Address::decode(address)?, secret })
    }

    /// A loopback address of rank 0 is of no use to other hosts. All ranks see this alike.
    fn check_hosts(&self) -> Result<()> {
        let loopback = self.address.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let first = self.hosts.first();
        match self.hosts.iter().find(|host| Some(*host) != first) {
            Some(other) if loopback => Err(Error::new(
                ErrorKind::InvalidInput,
                OPERATION,
                format!(
                    "rank 0 listens on {} of host {:?}, but there are ranks on {other:?}; expected \
                     an address that all can reach",
                    self.address.host,
                    first.map_or("", String::as_str)
                ),
            )
            .with_fix(format!(
                "name the network interface to meet on, on all ranks: `interface` in [world] of the config, or \
                 {INTERFACE_VARIABLE}"
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_that_fails_lies_or_crosses_hosts_is_refused() {
        let check = |items: &[&str]| {
            let all: Vec<Vec<u8>> = items.iter().map(|item| item.as_bytes().to_vec()).collect();
            Exchanged::read(&all, 2).and_then(|exchanged| exchanged.check_hosts())
        };
        let address = Address { host: "127.0.0.1".into(), port: 4000, job: [0xab; 16] };
        let hub = format!("a\n{}\n", address.encode());
        assert!(check(&[&hub, "a"]).is_ok());
        let message = |items: &[&str]| check(items).unwrap_err().to_string();
        assert!(message(&[&hub]).contains("gave 1 items, expected 2"));
        assert!(message(&["a", "a"]).contains("no address for rank 0"));
        assert!(message(&["a\n!port taken", "a"]).contains("rank 0 cannot listen: port taken"));
        assert!(message(&[&hub, "b"]).contains("there are ranks on \"b\""));
    }
}
