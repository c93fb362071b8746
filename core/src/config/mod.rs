//! The TOML file that chooses the parts.
