//! Teams: lists of world ranks, into which a `peer` is an index. Most cases have one team, in which an index is a
//! world rank; some have others, so that a transport which takes one for the other shows.

use tokenyard_core::Result as CoreResult;
use tokenyard_core::bootstrap::World;
use tokenyard_core::exchange::Exchange;
use tokenyard_core::transport::{Command, NO_COMMAND, Team};

use anyhow::Result;
use tokenyard_core::abi;

use super::memory::{compare, pattern};
use super::needs::Needs;
use super::rig::Rig;
use super::waits::Total;
use super::{Body, TransportCase};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "teams_in_any_order_reach_their_peers",
    about: "two teams at once, each of every second rank from the last one down: peers are indices, not world ranks",
    invariants: "the order of calls: `open`; INV-1",
    ranks: &[4],
    needs: Needs { teams: Teams::Backwards(2), ..Needs::SMALL },
    body: Body::Connected(teams_in_any_order_reach_their_peers),
    ..TransportCase::BARE
}];

/// The teams of a world's ranks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Teams {
    /// All ranks, in their order.
    World,
    /// As many teams as this. Each has every so many-th rank, from the last one down, as rails have them upwards.
    Backwards(u32),
}

impl Teams {
    /// The team of world rank `me`.
    pub(super) fn of(self, me: u32, ranks: u32) -> Team {
        let Self::Backwards(teams) = self else { return Team::world(me, ranks) };
        let members: Vec<u32> =
            (0..ranks).rev().filter(|rank| rank % teams == me % teams).collect();
        let at = members.iter().take_while(|rank| **rank != me).count();
        Team::new(at as u32, members)
    }
}

/// Items of all world ranks, as those of the team in its order.
pub(super) fn of_team(team: &Team, mut all: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let take = |rank: &u32| all.get_mut(*rank as usize).map(std::mem::take).unwrap_or_default();
    team.world_ranks.iter().map(take).collect()
}

/// The exchange of a team while its transports open. All teams of the world take part in it.
#[derive(Debug)]
pub(super) struct Among<'a> {
    pub(super) world: &'a World,
    pub(super) team: &'a Team,
}

impl Exchange for Among<'_> {
    fn all_gather(&self, mine: &[u8]) -> CoreResult<Vec<Vec<u8>>> {
        Ok(of_team(self.team, self.world.all_gather("transport exchange", mine)?))
    }
}

/// Bytes of each put.
const BYTES: usize = 96;

/// Every rank puts to every peer, itself included, by its index. The bytes say which world ranks they are from and for.
fn teams_in_any_order_reach_their_peers(rig: &mut Rig<'_>) -> Result<()> {
    let seed = |rig: &Rig<'_>, writer: u32, reader: u32| {
        u64::from(rig.world_rank(writer)) << 16 | u64::from(rig.world_rank(reader))
    };
    let (me, ranks) = (rig.me(), rig.ranks());
    let from = |peer: u32| peer as usize * BYTES;
    let to = |writer: u32| (ranks + writer) as usize * BYTES;
    let mut puts = Vec::new();
    for peer in 0..ranks {
        rig.windows[0].write(from(peer), &pattern(seed(rig, me, peer), BYTES));
        puts.push(Command {
            op: abi::TY_OP_PUT_SIGNAL,
            flags: abi::TY_FLAG_NOTIFY,
            peer,
            signal: rig.signal(0, 0, me),
            add: 1 + rig.world_rank(me),
            src_offset: from(peer) as u64,
            dst_offset: to(me) as u64,
            bytes: BYTES as u64,
            tag: u64::from(peer),
            ..NO_COMMAND
        });
    }
    rig.post(0, &puts)?;
    let total = |rig: &Rig<'_>, peer| Total {
        queue: 0,
        id: rig.signal(0, 0, peer),
        total: u64::from(1 + rig.world_rank(peer)),
    };
    let totals: Vec<_> = (0..ranks).map(|peer| total(rig, peer)).collect();
    rig.wait_signals(&totals)?;
    for writer in 0..ranks {
        let found = rig.windows[0].read(to(writer), BYTES);
        let what = format!("put of peer {writer}, which is world rank {}", rig.world_rank(writer));
        compare(&what, &found, &pattern(seed(rig, writer, me), BYTES))?;
    }
    for event in rig.wait_events(0, ranks as usize)? {
        anyhow::ensure!(
            u64::from(event.peer) == event.tag,
            "found {event:?}; expected peer {}: an index into the team",
            event.tag
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn teams_hold_every_rank_once_and_know_their_own() {
        for (teams, ranks) in [(1, 2), (2, 4), (2, 5)] {
            for me in 0..ranks {
                let team = Teams::Backwards(teams).of(me, ranks);
                assert_eq!(team.world_ranks[team.me as usize], me);
                assert!(team.world_ranks.is_sorted_by(|one, next| one > next), "{team:?}");
            }
        }
        assert_eq!(Teams::Backwards(2).of(1, 4).world_ranks, [3, 1]);
        assert_eq!(Teams::World.of(1, 3), Team::world(1, 3));
    }
}
