//! Marks in the capture of a graph: the work behind which later recorded operations run, on whatever stream of the
//! capture. Without them, operations on parallel branches would run at once, and in another order on each rank.

use std::cell::RefCell;
use std::sync::Arc;

use tokenyard_core::Result;

use crate::driver::{Context, Event, RawStream};

/// A mark for each stream of one capture.
#[derive(Debug)]
struct Marks<S, M> {
    capture: u64,
    held: Vec<(S, M)>,
    spare: Vec<M>,
}

impl<S: Copy + PartialEq, M> Marks<S, M> {
    fn new() -> Self {
        Self { capture: 0, held: Vec::new(), spare: Vec::new() }
    }

    /// The mark of a stream. Those of an earlier capture are given up: nothing outside of it may wait for them.
    fn of(&mut self, capture: u64, stream: S, make: impl FnOnce() -> Result<M>) -> Result<&M> {
        if self.capture != capture {
            self.clear();
            self.capture = capture;
        }
        let index = match self.held.iter().position(|(of, _)| *of == stream) {
            Some(index) => index,
            None => {
                let mark = self.spare.pop().map_or_else(make, Ok)?;
                self.held.push((stream, mark));
                self.held.len() - 1
            }
        };
        Ok(&self.held[index].1)
    }

    /// The marks that work on a stream does not follow by itself.
    fn of_others(&self, capture: u64, stream: S) -> impl Iterator<Item = &M> {
        let held = if self.capture == capture { self.held.as_slice() } else { &[] };
        held.iter().filter(move |(of, _)| *of != stream).map(|(_, mark)| mark)
    }

    fn clear(&mut self) {
        self.spare.extend(self.held.drain(..).map(|(_, mark)| mark));
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct CaptureMarks {
    context: Arc<Context>,
    marks: RefCell<Marks<RawStream, Event>>,
}

impl CaptureMarks {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), marks: RefCell::new(Marks::new()) }
    }

    /// Operations that are recorded from now on in the capture of a stream run behind its present work. A stream
    /// that captures nothing is left as it is.
    pub(super) fn mark(&self, stream: RawStream) -> Result<()> {
        let Some(capture) = stream.capture(&self.context)? else { return Ok(()) };
        let mut marks = self.marks.borrow_mut();
        marks.of(capture, stream, || Event::new(&self.context))?.record(stream)
    }

    /// The next work of `work` in the capture of `stream` runs behind all marks, which end with that: the next
    /// operation runs behind this one.
    pub(super) fn hold(&self, stream: RawStream, work: RawStream) -> Result<()> {
        let Some(capture) = stream.capture(&self.context)? else { return Ok(()) };
        let mut marks = self.marks.borrow_mut();
        marks.of_others(capture, work).try_for_each(|mark| mark.hold(work))?;
        marks.clear();
        Ok(())
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
    fn marks_end_with_their_capture_and_serve_again() {
        let (mut marks, mut make) = marks();
        marks.of(7, 'a', &mut make).unwrap();
        marks.of(7, 'b', &mut make).unwrap();
        marks.of(8, 'c', &mut make).unwrap();
        assert_eq!(marks.of_others(8, 'a').count(), 1);
        marks.clear();
        assert_eq!(marks.of_others(8, 'a').count(), 0);
        // Of all these, two were ever made.
        let most = ['a', 'b'].map(|stream| *marks.of(9, stream, &mut make).unwrap());
        assert!(most.iter().all(|mark| *mark <= 2), "{most:?}");
    }
}
