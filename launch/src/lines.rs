//! Cuts a byte stream into lines, and stores the last part of a stream.

/// Collects bytes until a line is complete.
#[derive(Default)]
pub(crate) struct Lines {
    pending: Vec<u8>,
}

impl Lines {
    /// Adds bytes and passes every line that they complete, without its newline, to `each`.
    pub(crate) fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            self.pending.extend_from_slice(&rest[..end]);
            each(&self.pending);
            self.pending.clear();
            rest = &rest[end + 1..];
        }
        self.pending.extend_from_slice(rest);
    }

    /// Passes an incomplete line to `each`, if there is one.
    pub(crate) fn flush(&mut self, mut each: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            each(&self.pending);
            self.pending.clear();
        }
    }

    /// Length in bytes of the line that is not complete yet.
    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }
}

/// Most bytes a [`Tail`] shows.
pub(crate) const TAIL_BYTES: usize = 64 << 10;

/// The last [`TAIL_BYTES`] of a stream.
#[derive(Default)]
pub(crate) struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    /// Adds bytes and discards the oldest beyond the limit.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        // A cut at twice the length moves each byte once, instead of at every push.
        if self.bytes.len() > 2 * TAIL_BYTES {
            self.bytes.drain(..self.bytes.len() - TAIL_BYTES);
        }
    }

    /// The stored bytes as text; bytes that are not UTF-8 are replaced.
    pub(crate) fn text(&self) -> String {
        let start = self.bytes.len().saturating_sub(TAIL_BYTES);
        String::from_utf8_lossy(&self.bytes[start..]).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_the_same_however_the_stream_is_cut() {
        let stream = b"one\n\ntwo words\nlast";
        for size in 1..=stream.len() {
            let mut lines = Lines::default();
            let mut found: Vec<Vec<u8>> = Vec::new();
            for chunk in stream.chunks(size) {
                lines.push(chunk, |line| found.push(line.to_vec()));
            }
            assert_eq!(lines.pending(), 4, "chunks of {size}");
            lines.flush(|line| found.push(line.to_vec()));
            lines.flush(|line| found.push(line.to_vec()));
            assert_eq!(found, [&b"one"[..], b"", b"two words", b"last"], "chunks of {size}");
        }
    }

    #[test]
    fn tail_keeps_exactly_the_last_bytes() {
        let mut tail = Tail::default();
        for i in 0..40_000u32 {
            tail.push(format!("{i:06}\n").as_bytes());
            assert!(tail.bytes.len() <= 2 * TAIL_BYTES + 7);
        }
        let text = tail.text();
        assert_eq!(text.len(), TAIL_BYTES);
        assert!(text.ends_with("039998\n039999\n"));
    }
}
