//! A set of nodes: the work that comes before something.

/// Nodes by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Past {
    words: Vec<u64>,
}

impl Past {
    pub(crate) fn insert(&mut self, node: usize) {
        let word = node / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (node % 64);
    }

    pub(crate) fn contains(&self, node: usize) -> bool {
        self.words.get(node / 64).is_some_and(|word| word & (1 << (node % 64)) != 0)
    }

    pub(crate) fn extend(&mut self, other: &Self) {
        if self.words.len() < other.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        self.words.iter_mut().zip(&other.words).for_each(|(word, more)| *word |= more);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> {
        (0..64 * self.words.len()).filter(|node| self.contains(*node))
    }

    /// Whether the other set has all of these nodes.
    pub(crate) fn is_within(&self, other: &Self) -> bool {
        self.iter().all(|node| other.contains(node))
    }
}
