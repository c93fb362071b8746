use std::sync::Arc;
use std::time::Duration;

use super::super::control::{Call, Member, Timing};
use super::super::identity::{Identity, RankId, Rendezvous};
use super::super::liveness::Liveness;
use super::super::message::Op;
use super::super::rendezvous::{NextStep, enter};
use super::super::secret::Secret;
use super::super::world::{World, WorldOptions};
use super::*;

#[test]
fn a_rank_0_that_lives_and_gives_no_result_counts_as_lost_on_both_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let identity = |rank| {
        let place = RankId { rank, ranks: 2, local_rank: rank };
        Identity::new(place, Rendezvous::File { path: folder.path().join("job") }).unwrap()
    };
    let timing = Timing { deadline: Duration::from_millis(600), late: Duration::from_secs(60) };
    let options = WorldOptions {
        deadline: timing.deadline,
        late: timing.late,
        ..WorldOptions::new(identity(0))
    };
    let hub = std::thread::spawn(move || World::join(options).unwrap());
    let next = enter(identity(1), Secret::none(), Local::Any, Default::default()).unwrap().next;
    let NextStep::Spoke { target, credentials, local } = next else { panic!("no spoke") };
    let liveness = Arc::new(Liveness::new(1, 2, OnFailure::Stop));
    let place = RankId { rank: 1, ranks: 2, local_rank: 1 };
    let member = Member::new(place, timing, OnFailure::Stop, liveness);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let hub = runtime.block_on(async {
        let mut spoke = Spoke::join(member, &Route { target, local }, credentials).await.unwrap();
        let hub = hub.join().unwrap();
        // Rank 0 does not call this collective, and gives it up in a minute: its result is late.
        spoke.member.timing.late = Duration::ZERO;
        let call = || Call { op: Op::Barrier, topic: "ready".to_owned(), data: Vec::new() };
        let error = spoke.collective(call()).await.unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)), "{error}");
        assert!(error.to_string().contains("gave no result of \"ready\""), "{error}");
        let again = spoke.collective(call()).await.unwrap_err();
        assert_eq!(again.kind(), ErrorKind::PeerLost, "{again}");
        spoke.leave(Farewell::Goodbye).await;
        hub
    });
    let news = hub.liveness();
    let start = Instant::now();
    while news.gone("wait").is_none() && start.elapsed() < timing.late {
        std::thread::sleep(Duration::from_millis(2));
    }
    let error = hub.barrier("ready").unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)), "{error}");
    assert!(error.to_string().contains("it declared rank 0 lost"), "{error}");
}
