//! Streams, events and captures of the model.

use std::collections::BTreeMap;

use tokenyard_core::{Error, ErrorKind, Result};

use super::Past;
use crate::driver::{RawEvent, RawStream};

/// The order that work belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// It runs.
    Eager,
    /// The present capture of its stream records it.
    Graph,
}

/// A piece of work.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) past: Past,
    /// The capture that records it.
    pub(super) capture: Option<u64>,
    /// Whether it has run.
    pub(super) is_done: bool,
}

/// A stream: the work that its next node runs behind.
#[derive(Debug, Default)]
struct StreamState {
    eager: Past,
    /// In a capture: its number, and the work of the graph.
    graph: Option<(u64, Past)>,
}

/// The place at which an event was recorded last.
#[derive(Clone, Debug)]
enum Mark {
    Nowhere,
    Eager(Past),
    Graph(u64, Past),
}

/// The mode of a thread that makes calls which a capture elsewhere would refuse; a thread begins in another one.
pub(super) const RELAXED: i32 = 2;

/// See the [module](super).
#[derive(Debug, Default)]
pub(super) struct ModelState {
    last_handle: usize,
    streams: BTreeMap<usize, StreamState>,
    events: BTreeMap<usize, Mark>,
    pub(super) nodes: Vec<Node>,
    last_capture: u64,
    /// Captures that go on, and the streams on which they were started.
    open: BTreeMap<u64, usize>,
    pub(super) mode: i32,
    pub(super) errors: Vec<String>,
}

impl ModelState {
    /// An error of the driver, which is remembered.
    pub(super) fn fail<T>(&mut self, operation: &'static str, text: &str) -> Result<T> {
        self.errors.push(format!("{operation}: {text}"));
        Err(Error::new(ErrorKind::Internal, operation, text))
    }

    /// Refuses calls that a capture in global mode forbids.
    pub(super) fn check_mode(&mut self, operation: &'static str) -> Result<()> {
        if self.open.is_empty() || self.mode == RELAXED {
            return Ok(());
        }
        self.fail(
            operation,
            "UNSUPPORTED: a capture in global mode goes on, and the thread is not relaxed",
        )
    }

    fn handle(&mut self) -> usize {
        self.last_handle += 16;
        self.last_handle
    }

    pub(super) fn create_stream(&mut self) -> RawStream {
        let handle = self.handle();
        self.streams.insert(handle, StreamState::default());
        RawStream(std::ptr::without_provenance_mut(handle))
    }

    pub(super) fn destroy_stream(&mut self, stream: RawStream) {
        self.streams.remove(&stream.0.addr());
    }

    pub(super) fn create_event(&mut self) -> RawEvent {
        let handle = self.handle();
        self.events.insert(handle, Mark::Nowhere);
        RawEvent(std::ptr::without_provenance_mut(handle))
    }

    pub(super) fn destroy_event(&mut self, event: RawEvent) {
        self.events.remove(&event.0.addr());
    }

    fn stream(&mut self, stream: RawStream) -> &mut StreamState {
        self.streams.get_mut(&stream.0.addr()).expect("a stream that lives")
    }

    pub(super) fn capture_of(&mut self, stream: RawStream) -> Option<u64> {
        self.stream(stream).graph.as_ref().map(|(capture, _)| *capture)
    }

    pub(super) fn end_of(&mut self, stream: RawStream, order: Order) -> Past {
        let state = self.stream(stream);
        match (order, &state.graph) {
            (Order::Eager, _) => state.eager.clone(),
            (Order::Graph, Some((_, past))) => past.clone(),
            (Order::Graph, None) => Past::default(),
        }
    }

    pub(super) fn work(&mut self, stream: RawStream) -> usize {
        let number = self.nodes.len();
        let state = self.stream(stream);
        let capture = state.graph.as_ref().map(|(capture, _)| *capture);
        let end = state.graph.as_mut().map_or(&mut state.eager, |(_, past)| past);
        let past = end.clone();
        end.insert(number);
        self.nodes.push(Node { past, capture, is_done: false });
        number
    }

    pub(super) fn begin(&mut self, stream: RawStream) {
        assert_eq!(self.capture_of(stream), None, "the stream captures nothing yet");
        self.last_capture += 1;
        let capture = self.last_capture;
        self.open.insert(capture, stream.0.addr());
        self.stream(stream).graph = Some((capture, Past::default()));
    }

    pub(super) fn end(&mut self, stream: RawStream) -> Result<()> {
        let capture = self.capture_of(stream);
        let Some(capture) = capture.filter(|c| self.open.get(c) == Some(&stream.0.addr())) else {
            return self.fail("end capture", "UNMATCHED: no capture was started on this stream");
        };
        let whole = self.end_of(stream, Order::Graph);
        let mut all_joined = true;
        for state in self.streams.values_mut() {
            if let Some((_, past)) = state.graph.take_if(|(of, _)| *of == capture) {
                all_joined &= past.is_within(&whole);
            }
        }
        self.open.remove(&capture);
        if all_joined {
            return Ok(());
        }
        self.fail(
            "end capture",
            "UNJOINED: a stream has work that the first stream does not wait for",
        )
    }

    pub(super) fn record(&mut self, event: RawEvent, stream: RawStream) {
        let state = self.stream(stream);
        let mark = match &state.graph {
            Some((capture, past)) => Mark::Graph(*capture, past.clone()),
            None => Mark::Eager(state.eager.clone()),
        };
        self.events.insert(event.0.addr(), mark);
    }

    pub(super) fn wait(&mut self, stream: RawStream, event: RawEvent) -> Result<()> {
        let operation = "wait for event";
        let mark = self.events[&event.0.addr()].clone();
        let is_open = matches!(&mark, Mark::Graph(of, _) if self.open.contains_key(of));
        let state = self.stream(stream);
        match (&mut state.graph, mark) {
            (None, Mark::Nowhere) => Ok(()),
            (None, Mark::Eager(past)) => {
                state.eager.extend(&past);
                Ok(())
            }
            (None, Mark::Graph(..)) if !is_open => {
                self.fail(operation, "CAPTURED EVENT: it was recorded in a capture that has ended")
            }
            (None, Mark::Graph(capture, past)) => {
                state.graph = Some((capture, past));
                // A fork is a node of its own, so the stream must be joined back even if no work follows.
                self.work(stream);
                Ok(())
            }
            (Some((capture, end)), Mark::Graph(of, past)) if *capture == of => {
                end.extend(&past);
                Ok(())
            }
            (Some(_), Mark::Graph(..)) => {
                self.fail(operation, "MERGE: stream and event belong to two captures")
            }
            (Some(_), _) => self.fail(operation, "ISOLATION: the event is outside the capture"),
        }
    }

    /// Lets the present work of a stream run.
    pub(super) fn pass(&mut self, stream: RawStream) {
        let past = self.end_of(stream, Order::Eager);
        self.run(&past);
    }

    fn run(&mut self, past: &Past) {
        past.iter().for_each(|node| self.nodes[node].is_done = true);
    }

    /// Whether all nodes have run; if not, they do so now.
    fn ask(&mut self, past: &Past) -> bool {
        let over = past.iter().all(|node| self.nodes[node].is_done);
        self.run(past);
        over
    }

    pub(super) fn query_stream(&mut self, stream: RawStream) -> Result<bool> {
        self.check_mode("query stream")?;
        if self.capture_of(stream).is_some() {
            return self.fail("query stream", "UNSUPPORTED: the stream is captured");
        }
        let past = self.end_of(stream, Order::Eager);
        Ok(self.ask(&past))
    }

    pub(super) fn query_event(&mut self, event: RawEvent) -> Result<bool> {
        self.check_mode("query event")?;
        match self.events[&event.0.addr()].clone() {
            Mark::Nowhere => Ok(true),
            Mark::Eager(past) => Ok(self.ask(&past)),
            Mark::Graph(..) => self.fail("query event", "CAPTURED EVENT: a graph has it"),
        }
    }
}
