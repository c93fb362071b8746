//! Marks in the capture of a graph: the work behind which later recorded operations run, on whatever stream of the
//! capture. Without them, operations on parallel branches would run at once, and in another order on each rank.

use std::cell::RefCell;
use std::sync::Arc;

use tokenyard_core::Result;

use crate::driver::{Context, Event, RawStream};

/// Marks of captures that have ended are given up where there are more than these: no call says when one ends.
const MOST_MARKS: usize = 64;

/// A mark for each stream of each capture.
#[derive(Debug)]
struct Marks<S, M> {
    /// The oldest first.
    held: Vec<(u64, S, M)>,
    spare: Vec<M>,
}

impl<S: Copy + PartialEq, M> Marks<S, M> {
    fn new() -> Self {
        Self { held: Vec::new(), spare: Vec::new() }
    }

    /// The mark of a stream in a capture.
    fn of(&mut self, capture: u64, stream: S, make: impl FnOnce() -> Result<M>) -> Result<&M> {
        let known = |&(c, s, _): &(u64, S, M)| c == capture && s == stream;
        let index = match self.held.iter().position(known) {
            Some(index) => index,
            None => {
                if self.held.len() == MOST_MARKS {
                    self.spare.push(self.held.remove(0).2);
                }
                let mark = self.spare.pop().map_or_else(make, Ok)?;
                self.held.push((capture, stream, mark));
                self.held.len() - 1
            }
        };
        Ok(&self.held[index].2)
    }

    /// The marks that work on a stream of a capture does not follow by itself.
    fn of_others(&self, capture: u64, stream: S) -> impl Iterator<Item = &M> {
        let others = self.held.iter().filter(move |(c, s, _)| *c == capture && *s != stream);
        others.map(|(_, _, mark)| mark)
    }

    /// Gives up the marks of a capture.
    fn clear(&mut self, capture: u64) {
        let ended = self.held.extract_if(.., |(c, _, _)| *c == capture);
        self.spare.extend(ended.map(|(_, _, mark)| mark));
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct CaptureMarks {
    context: Arc<Context>,
    marks: RefCell<Marks<RawStream, Event>>,
}

impl CaptureMarks {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), marks: RefCell::new(Marks::new()) }
    }

    /// Operations that are recorded from now on in the capture of a stream run behind its present work. A stream
    /// that captures nothing is left as it is.
    pub(crate) fn mark(&self, stream: RawStream) -> Result<()> {
        let Some(capture) = stream.capture(&self.context)? else { return Ok(()) };
        let mut marks = self.marks.borrow_mut();
        marks.of(capture, stream, || Event::new(&self.context))?.record(stream)
    }

    /// The next work of `work` in the capture of `stream` runs behind all marks, which end with that: the next
    /// operation runs behind this one.
    pub(crate) fn hold(&self, stream: RawStream, work: RawStream) -> Result<()> {
        let Some(capture) = stream.capture(&self.context)? else { return Ok(()) };
        let mut marks = self.marks.borrow_mut();
        marks.of_others(capture, work).try_for_each(|mark| mark.hold(work))?;
        marks.clear(capture);
        Ok(())
    }

    /// The next work of a stream runs behind all marks of its capture, as do later operations.
    pub(crate) fn follow(&self, stream: RawStream) -> Result<()> {
        let Some(capture) = stream.capture(&self.context)? else { return Ok(()) };
        self.marks.borrow().of_others(capture, stream).try_for_each(|mark| mark.hold(stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks() -> (Marks<char, u32>, impl FnMut() -> Result<u32>) {
        let mut made = 0;
        let make = move || {
            made += 1;
            Ok(made)
        };
        (Marks::new(), make)
    }

    #[test]
    fn work_follows_the_marks_of_other_streams_of_its_capture_alone() {
        let (mut marks, mut make) = marks();
        assert_eq!(*marks.of(7, 'a', &mut make).unwrap(), 1);
        assert_eq!(*marks.of(7, 'b', &mut make).unwrap(), 2);
        // A stream has one mark, which is made at a later place again.
        assert_eq!(*marks.of(7, 'a', &mut make).unwrap(), 1);
        assert_eq!(marks.of_others(7, 'a').collect::<Vec<_>>(), [&2]);
        assert_eq!(marks.of_others(7, 'c').collect::<Vec<_>>(), [&1, &2]);
        assert_eq!(marks.of_others(8, 'c').count(), 0);
    }

    #[test]
    fn marks_serve_again_and_captures_do_not_share_them() {
        let (mut marks, mut make) = marks();
        marks.of(7, 'a', &mut make).unwrap();
        marks.of(8, 'b', &mut make).unwrap();
        assert_eq!((marks.of_others(7, 'z').count(), marks.of_others(8, 'z').count()), (1, 1));
        marks.clear(7);
        assert_eq!((marks.of_others(7, 'z').count(), marks.of_others(8, 'z').count()), (0, 1));
        assert_eq!(*marks.of(9, 'c', &mut make).unwrap(), 1);
    }

    #[test]
    fn marks_of_captures_that_ended_are_bounded() {
        let (mut marks, mut make) = marks();
        for capture in 0..1000 {
            marks.of(capture, 'a', &mut make).unwrap();
        }
        assert_eq!(marks.held.len(), MOST_MARKS);
        assert!(marks.held.iter().all(|(_, _, mark)| *mark <= MOST_MARKS as u32));
        assert_eq!(marks.of_others(999, 'z').count(), 1);
    }
}
