//! The model against CUDA's rules.

use tokenyard_core::Result;

use super::{Order, begin, end, end_of, errors, is_done, node, reset, work};
use crate::driver::{Event, RawStream, RelaxedCapture, Stream};

fn chain(mark: &Event, first: RawStream, then: RawStream) -> Result<()> {
    mark.record(first)?;
    mark.hold(then)
}

fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.expect_err("an error of the driver").to_string()
}

#[test]
fn a_stream_that_waits_runs_behind_the_mark_and_not_behind_later_work() {
    let context = reset();
    let [a, b] = [(); 2].map(|()| Stream::new(&context).expect("a stream"));
    let mark = Event::new(&context).expect("an event");
    let first = work(a.name());
    mark.record(a.name()).expect("recorded");
    let later = work(a.name());
    mark.hold(b.name()).expect("held");
    let last = work(b.name());
    let (capture, past) = node(last);
    assert_eq!((capture, past.contains(first), past.contains(later)), (None, true, false));
    // A query finds pending work, which then ends.
    assert_eq!([b.is_idle(), b.is_idle()].map(Result::ok), [Some(false), Some(true)]);
    assert_eq!([first, later, last].map(is_done), [true, false, true]);
}

#[test]
fn a_stream_that_waits_for_a_capture_joins_it_until_that_ends() {
    let context = reset();
    let [a, b] = [(); 2].map(|()| Stream::new(&context).expect("a stream"));
    let mark = Event::new(&context).expect("an event");
    begin(a.name());
    chain(&mark, a.name(), b.name()).expect("joined");
    assert_eq!(b.name().capture(&context).expect("asked"), Some(1));
    let branch = work(b.name());
    assert_eq!(node(branch).0, Some(1));
    chain(&mark, b.name(), a.name()).expect("joined back");
    end(a.name()).expect("all are joined");
    assert!(!b.name().is_captured(&context).expect("asked"));
    assert!(!end_of(b.name(), Order::Eager).contains(branch), "recorded work does not run");
    assert!(text(mark.hold(b.name())).contains("CAPTURED EVENT"));
    assert!(text(mark.is_done()).contains("CAPTURED EVENT"));
    assert_eq!(errors().len(), 2);
}

#[test]
fn captures_refuse_outside_work_other_captures_and_streams_that_are_not_joined() {
    let context = reset();
    let [a, b, c] = [(); 3].map(|()| Stream::new(&context).expect("a stream"));
    let [mark, eager] = [(); 2].map(|()| Event::new(&context).expect("an event"));
    eager.record(c.name()).expect("recorded");
    begin(a.name());
    begin(b.name());
    assert!(text(eager.hold(a.name())).contains("ISOLATION"));
    assert!(text(chain(&mark, a.name(), b.name())).contains("MERGE"));
    chain(&mark, a.name(), c.name()).expect("joined");
    assert!(text(end(c.name())).contains("UNMATCHED"));
    assert!(text(end(a.name())).contains("UNJOINED"));
    end(b.name()).expect("nothing has joined it");
}

#[test]
fn only_a_relaxed_thread_asks_for_ends_of_work_while_a_capture_goes_on() {
    let context = reset();
    let [a, b] = [(); 2].map(|()| Stream::new(&context).expect("a stream"));
    begin(a.name());
    let driver = context.driver();
    // SAFETY: streams that live.
    let asked = || unsafe { driver.stream_query(b.name()) };
    // SAFETY: as above.
    let waited = || unsafe { driver.stream_synchronize(b.name()) };
    assert!(text(asked()).contains("not relaxed"));
    assert!(text(waited()).contains("not relaxed"));
    assert!(text(driver.alloc(16)).contains("not relaxed"));
    let relaxed = RelaxedCapture::enter(&context).expect("relaxed");
    assert!(asked().is_ok() && waited().is_ok() && driver.alloc(16).is_ok());
    assert!(text(a.is_idle()).contains("the stream is captured"));
    drop(relaxed);
    assert!(asked().is_err());
    end(a.name()).expect("ended");
    assert!(asked().is_ok());
    assert!(text(driver.alloc_pinned(16)).contains("no such function"));
}
