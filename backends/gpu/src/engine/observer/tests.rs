use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;

/// A stand-in for the device that only has numbers.
#[derive(Default)]
struct Numbers {
    mark: AtomicU64,
    looks: AtomicU64,
    /// Not 0: the mark of the operation that has failed.
    failed: AtomicU64,
    /// Whether polls return errors.
    lost: AtomicBool,
    ended: AtomicBool,
    /// Number of polls of other kernels, and whether they return errors.
    around: AtomicU64,
    is_stuck: AtomicBool,
}

fn wrong(operation: u64) -> Error {
    Error::new(ErrorKind::Deadline, "wait", format!("operation {operation}")).with_rank(3)
}

impl Sight for Numbers {
    type Held = ();

    fn begin(&self) {}

    fn look_around(&self, _: &mut Seen) -> Result<()> {
        self.around.fetch_add(1, Ordering::AcqRel);
        if self.is_stuck.load(Ordering::Acquire) { Err(wrong(77)) } else { Ok(()) }
    }

    fn mark(&self) -> u64 {
        self.mark.load(Ordering::Acquire)
    }

    fn look(&self, wait: Wait, _: &mut Seen) -> Result<()> {
        self.looks.fetch_add(1, Ordering::AcqRel);
        if self.lost.load(Ordering::Acquire) { Err(wrong(wait.operation)) } else { Ok(()) }
    }

    fn judge(&self, wait: Wait) -> Result<()> {
        let failed = self.failed.load(Ordering::Acquire);
        if wait.operation == failed { Err(wrong(failed)) } else { Ok(()) }
    }

    fn wind_up(&self, _: &Outstanding, error: Error) -> Error {
        self.ended.store(true, Ordering::Release);
        error
    }
}

fn outstanding(number: u64) -> Outstanding {
    let wait = Wait { operation: number, phase: 3, level: 0, rank: 1 };
    Outstanding { wait, mark: number }
}

/// Returns once `ready` is true; the test fails if that does not happen.
fn until(ready: impl Fn() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < Duration::from_secs(60), "it never came");
        std::thread::sleep(LOOK);
    }
}

#[test]
fn operations_are_watched_until_they_end_in_their_order() {
    let device = Arc::new(Numbers::default());
    let mut watching = Watching::new(&device);
    assert!(watching.thread.is_none(), "without work there is no thread");
    for number in [1, 2] {
        watching.add(outstanding(number)).unwrap();
    }
    until(|| device.looks.load(Ordering::Acquire) > 0);
    device.mark.store(1, Ordering::Release);
    until(|| watching.shared.state().outstanding.len() == 1);
    device.mark.store(2, Ordering::Release);
    until(|| watching.shared.state().outstanding.is_empty());
    assert!(watching.shared.check().is_ok());
}

#[test]
fn an_observer_without_work_sleeps_and_wakes_for_the_next_operation() {
    let device = Arc::new(Numbers::default());
    let mut watching = Watching::new(&device);
    device.mark.store(1, Ordering::Release);
    watching.add(outstanding(1)).unwrap();
    until(|| watching.shared.state().sleeps);
    watching.add(outstanding(2)).unwrap();
    until(|| device.looks.load(Ordering::Acquire) > 0);
    device.mark.store(2, Ordering::Release);
    until(|| watching.shared.state().outstanding.is_empty());
    watching.stop();
}

#[test]
fn an_operation_that_failed_is_reported_on_every_call_after_it() {
    let device = Arc::new(Numbers::default());
    device.failed.store(2, Ordering::Release);
    let mut watching = Watching::new(&device);
    device.mark.store(2, Ordering::Release);
    for number in [1, 2] {
        watching.add(outstanding(number)).unwrap();
    }
    until(|| watching.shared.check().is_err());
    for _ in 0..2 {
        let error = watching.shared.check().unwrap_err();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(3)));
        assert!(error.to_string().contains("operation 2"), "{error}");
    }
}

#[test]
fn a_wait_that_must_end_ends_all_and_the_first_reason_stays() {
    let device = Arc::new(Numbers::default());
    let mut watching = Watching::new(&device);
    for number in [5, 6] {
        watching.add(outstanding(number)).unwrap();
    }
    device.lost.store(true, Ordering::Release);
    until(|| watching.shared.check().is_err());
    assert!(device.ended.load(Ordering::Acquire));
    until(|| watching.shared.state().outstanding.is_empty());
    watching.shared.fail(&wrong(9));
    let error = watching.shared.check().unwrap_err();
    assert!(error.to_string().contains("operation 5"), "{error}");
}

#[test]
fn many_short_operations_need_no_more_room_than_there_is() {
    let device = Arc::new(Numbers::default());
    let mut watching = Watching::new(&device);
    let room = watching.shared.state().outstanding.capacity();
    for number in 1..1000 {
        watching.add(outstanding(number)).unwrap();
        device.mark.store(number, Ordering::Release);
    }
    until(|| watching.shared.state().outstanding.is_empty());
    assert_eq!(watching.shared.state().outstanding.capacity(), room);
}

#[test]
fn kernels_that_no_call_launched_are_watched_between_operations_and_their_end_is_reported() {
    let device = Arc::new(Numbers::default());
    let mut watching = Watching::new(&device);
    watching.stand().unwrap();
    until(|| device.around.load(Ordering::Acquire) > 2 * u64::from(IDLE_LOOKS));
    device.mark.store(1, Ordering::Release);
    watching.add(outstanding(1)).unwrap();
    until(|| watching.shared.state().outstanding.is_empty());
    device.is_stuck.store(true, Ordering::Release);
    until(|| watching.shared.check().is_err());
    let error = watching.shared.check().unwrap_err();
    assert!(error.to_string().contains("operation 77"), "{error}");
    assert!(!watching.shared.state().stands);
}

#[test]
fn it_stops_while_an_operation_is_outstanding() {
    let device = Arc::new(Numbers::default());
    let mut watching = Watching::new(&device);
    watching.add(outstanding(1)).unwrap();
    watching.stop();
    assert!(watching.thread.is_none());
}
