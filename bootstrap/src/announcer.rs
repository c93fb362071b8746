//! The call of a component that a rank is about to make, for those who may find its connection closed.

use std::fmt;
use std::sync::mpsc::sync_channel;

use tokio::sync::mpsc::UnboundedSender;

use super::control::{LINGER, Request};

/// Called with each call that this rank announces, before it is made; with an empty text once there is none.
pub type OnCall = fn(&str);

/// Tells the other ranks of a world what this one calls. It does not hold the world.
#[derive(Clone)]
pub struct Announcer {
    requests: UnboundedSender<Request>,
    on_call: Option<OnCall>,
}

impl Announcer {
    pub(super) fn new(requests: &UnboundedSender<Request>, on_call: Option<OnCall>) -> Self {
        Self { requests: requests.clone(), on_call }
    }

    /// Tells the other ranks of a call that may end this process, such as the load of a library: they name it then.
    /// Returns once the news has left this process, or after half a second. An empty text: there is none any more.
    pub fn announce(&self, call: &str) {
        if let Some(on_call) = self.on_call {
            on_call(call);
        }
        let (sent, is_sent) = sync_channel(1);
        if self.requests.send(Request::Announce { call: call.to_owned(), sent }).is_ok() {
            // The call goes ahead in any case.
            let _ = is_sent.recv_timeout(LINGER);
        }
    }
}

impl fmt::Debug for Announcer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Announcer")
    }
}

/// The end of a rank or of its connection, with the last call that the rank has announced.
pub fn with_call(why: String, call: &str) -> String {
    match call {
        "" => why,
        call => format!("{why}; the last call of a component that it announced is {call}"),
    }
}
