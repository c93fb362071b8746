//! A rendezvous through an all-gather of the caller.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::handshake::Credentials;
use super::identity::{ExchangeFn, RankId};
use super::interface::{INTERFACE_VARIABLE, Local};
use super::message::{MAX_REASON, decode, encode};
use super::other_hosts::OtherHosts;
use super::rendezvous::{Address, Entry, NextStep, OPERATION, Target, listen_anywhere};
use super::roster::{Card, Roster};
use super::secret::Secret;
use super::text::Text;
use tokenyard_errors::{Error, ErrorKind, Result};

/// The bytes of one rank.
#[derive(Serialize, Deserialize)]
struct RosterEntry {
    card: Card,
    /// Of rank 0 only.
    door: Option<Opened>,
}

/// The door of rank 0.
#[derive(Serialize, Deserialize)]
enum Opened {
    /// Its address and, where no secret is set, a fresh one.
    At { address: String, secret: Option<String> },
    /// The reason why there is none.
    Failed(#[serde(with = "Text::<MAX_REASON>")] String),
}

/// Every rank introduces itself; rank 0 adds its address and the secret, or the reason why it has no
/// address.
pub(super) fn enter_by_exchange(
    place: RankId,
    mut exchange: Box<ExchangeFn>,
    credentials: Credentials,
    local: Local,
    card: Card,
) -> Result<Entry> {
    let fresh = credentials.secret.is_none();
    let secret = if fresh && place.rank == 0 { Secret::generate()? } else { credentials.secret };
    // An error of rank 0 must reach the other ranks, which wait in the exchange.
    let bound = (place.rank == 0).then(|| listen_anywhere(local.own(), place.ranks, &secret));
    let door = bound.as_ref().map(|bound| match bound {
        Ok((_, address)) => Opened::At {
            address: address.encode(),
            secret: secret.reveal().filter(|_| fresh).map(str::to_owned),
        },
        Err(error) => Opened::Failed(error.to_string()),
    });
    let all = exchange(&encode(&RosterEntry { card, door })).map_err(|why| {
        Error::new(ErrorKind::System, OPERATION, format!("the caller's exchange failed: {why}"))
    })?;
    let bound = bound.transpose()?;
    let exchanged = Exchanged::read(&all, place.ranks)?;
    exchanged.check_machines()?;
    let next = match bound {
        Some((listener, address)) => {
            let credentials = Credentials { secret, job: address.job };
            NextStep::Hub { listener, credentials, notice: None, only_here: None }
        }
        None => {
            let secret = if fresh { exchanged.secret } else { secret };
            let Address { host, port, job } = exchanged.address;
            let credentials = Credentials { secret, job };
            let target = Target::Address { host, port, others: OtherHosts::default() };
            NextStep::Spoke { target, credentials, local }
        }
    };
    let roster = Roster::new(exchanged.cards);
    Ok(Entry { next, local_rank: roster.local_rank(place.rank), roster })
}

/// The result of a caller's exchange.
struct Exchanged {
    cards: Vec<Card>,
    address: Address,
    secret: Secret,
}

impl Exchanged {
    fn read(all: &[Vec<u8>], ranks: u32) -> Result<Self> {
        let refuse = |message: String| {
            Error::new(ErrorKind::Protocol, OPERATION, message).with_fix(
                "let the exchange return the bytes of every rank unchanged, by rank; and run the same \
                 tokenyard on every rank",
            )
        };
        if all.len() != ranks as usize {
            let found = all.len();
            return Err(refuse(format!("the exchange gave {found} items, expected {ranks}")));
        }
        let mut cards = Vec::with_capacity(all.len());
        let mut opened = None;
        for (rank, bytes) in all.iter().enumerate() {
            let RosterEntry { card, door } = decode(bytes).map_err(|error| {
                let message = format!(
                    "the exchange gave {} bytes for rank {rank} that are not those of a rank",
                    bytes.len()
                );
                refuse(message).with_source(error)
            })?;
            cards.push(card);
            opened = opened.or(door.filter(|_| rank == 0));
        }
        match opened {
            Some(Opened::At { address, secret }) => {
                let secret = secret.map_or(Ok(Secret::none()), |text| Secret::from_text(&text))?;
                Ok(Self { cards, address: Address::decode(&address)?, secret })
            }
            Some(Opened::Failed(why)) => {
                let message = format!("rank 0 cannot listen: {why}");
                Err(Error::new(ErrorKind::PeerLost, OPERATION, message).with_rank(0))
            }
            None => Err(refuse("the exchange gave no address for rank 0, expected one".into())),
        }
    }

    /// A loopback address of rank 0 is of no use to other machines. All ranks see this alike.
    fn check_machines(&self) -> Result<()> {
        let loopback = self.address.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let Some(first) = self.cards.first().filter(|_| loopback) else { return Ok(()) };
        match self.cards.iter().find(|card| card.machine != first.machine) {
            Some(other) => Err(Error::new(
                ErrorKind::InvalidInput,
                OPERATION,
                format!(
                    "rank 0 listens on {} of host {:?}, but there are ranks on another machine, host {:?}; \
                     expected an address that all can reach",
                    self.address.host, first.host, other.host
                ),
            )
            .with_fix(format!(
                "name the network interface to meet on, on all ranks: `interface` in [world] of the config, or \
                 {INTERFACE_VARIABLE}"
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Launched;

    fn introduction(machine: &str, door: Option<Opened>) -> Vec<u8> {
        let mut card = Card::mine(Launched::default());
        card.machine = machine.into();
        encode(&RosterEntry { card, door })
    }

    #[test]
    fn an_exchange_that_fails_lies_or_crosses_machines_is_refused() {
        let check = |items: &[Vec<u8>]| {
            Exchanged::read(items, 2).and_then(|exchanged| exchanged.check_machines())
        };
        let hub = |host: &str| {
            let address = Address { host: host.into(), port: 4000, job: [0xab; 16] };
            let door = Opened::At { address: address.encode(), secret: None };
            introduction("a", Some(door))
        };
        let [here, there] = ["a", "b"].map(|machine| introduction(machine, None));
        assert!(check(&[hub("127.0.0.1"), here.clone()]).is_ok());
        assert!(check(&[hub("192.0.2.1"), there.clone()]).is_ok());
        let message = |items: &[Vec<u8>]| check(items).unwrap_err().to_string();
        assert!(message(&[hub("127.0.0.1")]).contains("gave 1 items, expected 2"));
        assert!(message(&[here.clone(), here.clone()]).contains("no address for rank 0"));
        assert!(message(&[here.clone(), hub("127.0.0.1")]).contains("no address for rank 0"));
        let failed = introduction("a", Some(Opened::Failed("port taken".into())));
        assert!(message(&[failed, here.clone()]).contains("rank 0 cannot listen: port taken"));
        let text = message(&[here, b"a\n".to_vec()]);
        assert!(text.contains("2 bytes for rank 1 that are not those of a rank"), "{text}");
        assert!(text.contains("the same tokenyard on every rank"), "{text}");
        let text = message(&[hub("127.0.0.1"), there]);
        assert!(text.contains("there are ranks on another machine"), "{text}");
    }
}
