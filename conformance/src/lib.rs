//! Conformance of tokenyard: what every kernel set, transport and plugin has to do.
//!
//! The [`oracle`] says what is right. It shares no code with the product.

pub mod oracle;
