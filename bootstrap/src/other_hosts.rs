//! Ranks on other hosts than that of rank 0.

/// The ranks on other hosts than that of rank 0, as far as the source of the ranks knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtherHosts {
    /// The launcher states no others: rank 0 may listen on loopback only, with a warning.
    #[default]
    NotStated,
    /// The launcher states that it has ranks on several hosts.
    Stated,
    /// The ranks come from tokenyard's own variables, which cannot say it. A user who means one host names
    /// `localhost` or a loopback address.
    Unknown,
}
