//! For all posts and all behaviours of a share: every accepted command ends once.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::scripted::{Fatal, Remote, Script, Scripted, Seen};
use tokenyard_core::abi;
use tokenyard_core::proxy::{Proxy, ProxyOptions};
use tokenyard_core::transport::{Command, NO_COMMAND, NO_EVENT};

/// The deadline of expected events.
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
struct Plan {
    queues: u32,
    depth: u32,
    /// (queue, number of commands, n where every n-th requests its event), in the order of posting.
    batches: Vec<(u32, usize, u64)>,
    shares: Vec<Script>,
}

fn script() -> impl Strategy<Value = Script> {
    let failing = prop::collection::vec(0_usize..200, 0..4);
    let kind = prop_oneof![
        Just(Fatal::Post),
        Just(Fatal::Poll),
        Just(Fatal::Panic),
        Just(Fatal::Stranger)
    ];
    let fatal = prop::option::weighted(0.3, (0_usize..200, kind));
    (any::<u64>(), any::<bool>(), failing, fatal).prop_map(|(seed, moody, failing, fatal)| Script {
        seed,
        moody,
        stuck: false,
        failing,
        fatal,
    })
}

fn plan() -> impl Strategy<Value = Plan> {
    (1_u32..=4, 1_u32..=70).prop_flat_map(|(queues, depth)| {
        let batch = (0..queues, 1_usize..=80, 1_u64..=5);
        let batches = prop::collection::vec(batch, 1..20);
        let shares = prop::collection::vec(script(), 1..=3);
        (batches, shares).prop_map(move |(batches, shares)| Plan { queues, depth, batches, shares })
    })
}

/// One queue, from the view of its poster.
#[derive(Default)]
struct Poster {
    queue: u32,
    /// By tag: whether an event was requested, and the kinds of the events that arrived.
    commands: Vec<(bool, Vec<u32>)>,
    /// Commands with a requested event that has not arrived.
    missing: usize,
}

impl Poster {
    /// Posts the first of `count` new commands that the queue accepts; one in `every` requests its event.
    fn post_some(&mut self, proxy: &Proxy, count: usize, every: u64) -> usize {
        let first = self.commands.len() as u64;
        let command = |tag: u64| Command {
            queue: self.queue,
            flags: if tag.is_multiple_of(every) { abi::TY_FLAG_NOTIFY } else { 0 },
            peer: tag as u32 % 3,
            value: tag,
            tag,
            ..NO_COMMAND
        };
        let batch: Vec<_> = (first..first + count as u64).map(command).collect();
        // SAFETY: the shares of these tests access no memory.
        let accepted = unsafe { proxy.post(self.queue, &batch).unwrap() };
        for command in &batch[..accepted] {
            let notify = command.flags & abi::TY_FLAG_NOTIFY != 0;
            self.missing += usize::from(notify);
            self.commands.push((notify, Vec::new()));
        }
        accepted
    }

    fn poll(&mut self, proxy: &Proxy) {
        let mut events = [NO_EVENT; 5];
        let count = proxy.poll(self.queue, &mut events).unwrap();
        for event in &events[..count] {
            assert_eq!((event.queue, event.peer), (self.queue, event.tag as u32 % 3));
            assert_eq!(event.status < 0, event.kind == abi::TY_EVENT_ERROR);
            let (notify, kinds) = &mut self.commands[event.tag as usize];
            self.missing -= usize::from(*notify && kinds.is_empty());
            kinds.push(event.kind);
        }
    }

    fn post(&mut self, proxy: &Proxy, count: usize, every: u64) {
        let (start, mut posted) = (Instant::now(), 0);
        while posted < count {
            posted += self.post_some(proxy, count - posted, every);
            self.poll(proxy);
            assert!(start.elapsed() < DEADLINE, "{posted} of {count} commands were accepted");
        }
    }

    /// Polls until all commands have ended, those without an event too: then the queue accepts as many
    /// at once as it has room for.
    fn drain(&mut self, proxy: &Proxy, room: usize) {
        let (start, mut all_ended) = (Instant::now(), false);
        while self.missing > 0 || !all_ended {
            if self.missing == 0 {
                all_ended = self.post_some(proxy, room, 1) == room;
            }
            self.poll(proxy);
            assert!(start.elapsed() < DEADLINE, "{} events never came", self.missing);
        }
    }

    /// Compares the events with the commands that the queue's share has seen; `number` counts its
    /// commands.
    fn check(&self, script: &Script, seen: &Seen) {
        let of_queue =
            seen.accepted.iter().enumerate().filter(|(_, (queue, _))| *queue == self.queue);
        let accepted: Vec<_> = of_queue.map(|(number, (_, value))| (number, *value)).collect();
        assert!((0..).zip(&accepted).all(|(tag, (_, value))| tag == *value), "{accepted:?}");
        assert!(seen.dropped || accepted.len() == self.commands.len(), "commands were lost");
        for (tag, (notify, kinds)) in self.commands.iter().enumerate() {
            let number = accepted.get(tag).map(|(number, _)| *number);
            let failed = number.is_none_or(|number| script.failing.contains(&number));
            match kinds[..] {
                [] => assert!(!notify && !failed, "tag {tag} has no event"),
                [abi::TY_EVENT_DONE] => assert!(*notify && !failed, "tag {tag} is done"),
                [abi::TY_EVENT_ERROR] => assert!(failed || seen.dropped, "tag {tag} failed"),
                _ => panic!("tag {tag} ended {} times: {kinds:?}", kinds.len()),
            }
        }
    }
}

fn check(plan: &Plan) {
    let (shares, remotes): (Vec<_>, Vec<Remote>) =
        plan.shares.iter().cloned().map(Scripted::new).unzip();
    let proxy = Proxy::start(shares, &ProxyOptions::new(plan.queues, plan.depth)).unwrap();
    let mut posters: Vec<_> =
        (0..plan.queues).map(|queue| Poster { queue, ..Poster::default() }).collect();
    let room = plan.depth.next_power_of_two() as usize;
    std::thread::scope(|scope| {
        for poster in &mut posters {
            let proxy = &proxy;
            scope.spawn(move || {
                let queue = poster.queue;
                for (_, count, every) in plan.batches.iter().filter(|batch| batch.0 == queue) {
                    poster.post(proxy, *count, *every);
                }
                poster.drain(proxy, room);
            });
        }
    });

    let mut well = true;
    for poster in &posters {
        let share = poster.queue as usize % plan.shares.len();
        poster.check(&plan.shares[share], &remotes[share].seen());
    }
    for (first, remote) in remotes.iter().enumerate() {
        let queues = (first..plan.queues as usize).step_by(plan.shares.len()).count();
        assert!(remote.seen().most_in_flight <= queues * room, "INV-5");
        // A share without queues may fail, too, and its failure may be seen late.
        well &= !(queues > 0 && remote.seen().dropped);
    }
    assert!(well || proxy.health().is_err());
    assert!(!well || plan.queues < plan.shares.len() as u32 || proxy.health().is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_accepted_command_ends_once_and_reaches_the_share_in_order(plan in plan()) {
        check(&plan);
    }
}
