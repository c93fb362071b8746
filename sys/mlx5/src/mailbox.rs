//! Commands to the device, as bytes. Each is a table of fields. A macro makes from it the writer for a driver,
//! the reader for a software device and the list [`Mailbox::FIELDS`].
//!
//! Offsets are those of `mlx5_ifc.h`, on which rdma-core, NVSHMEM and mori agree. This project has never sent
//! a command to firmware.

mod query;
mod queue_pair;
mod queues;

use crate::field::{Field, Value};

pub use query::*;
pub use queue_pair::*;
pub use queues::*;

/// The opcode of every command.
pub const OPCODE: Field = Field::new(0, 0, 16);
/// The modifier of every opcode.
pub const OP_MOD: Field = Field::new(6, 0, 16);
/// The status of every answer: 0 is success.
pub const STATUS: Field = Field::new(0, 0, 8);
/// More about a failure, in every answer.
pub const SYNDROME: Field = Field::new(4, 0, 32);

/// A command or an answer of fixed size.
pub trait Mailbox: Sized {
    /// The name, for error texts.
    const NAME: &'static str;
    /// The size in bytes.
    const BYTES: usize;
    /// The fields that vary.
    const FIELDS: &'static [(&'static str, Field)];
    /// The fields that have one fixed value, the opcode among them.
    const FIXED: &'static [(&'static str, Field, u128)];

    /// The bytes.
    fn to_bytes(&self) -> Vec<u8>;

    /// Reads a command of a driver, and accepts only bits that are in the tables.
    ///
    /// # Errors
    /// The size is wrong, a fixed field has another value, or a bit of no field is set.
    fn from_bytes(bytes: &[u8]) -> Result<Self, MailboxError>;

    /// Reads an answer of a device. It may have more bits than the tables, and may be shorter.
    fn from_answer(bytes: &[u8]) -> Self;
}

/// An error for bytes that are not the expected command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MailboxError {
    /// Too short or too long.
    #[error("{mailbox}: found {found} bytes; expected {expected}")]
    Size {
        /// Name of the command.
        mailbox: &'static str,
        /// Bytes.
        found: usize,
        /// Bytes.
        expected: usize,
    },
    /// A field has a value that it must not have.
    #[error("{mailbox}: found {field} = {found:#x}; expected {expected:#x}")]
    Fixed {
        /// Name of the command.
        mailbox: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Value.
        found: u128,
        /// Value.
        expected: u128,
    },
    /// A bit that belongs to no field.
    #[error("{mailbox}: reserved bits are set in byte {byte:#x}: {bits:#04x}")]
    Reserved {
        /// Name of the command.
        mailbox: &'static str,
        /// Offset.
        byte: usize,
        /// The bits.
        bits: u8,
    },
}

/// Checks everything but the values of variable fields.
fn check<M: Mailbox>(bytes: &[u8]) -> Result<(), MailboxError> {
    let mailbox = M::NAME;
    if bytes.len() != M::BYTES {
        return Err(MailboxError::Size { mailbox, found: bytes.len(), expected: M::BYTES });
    }
    let mut rest = bytes.to_vec();
    for &(field, place, expected) in M::FIXED {
        let found = place.get(bytes);
        if found != expected {
            return Err(MailboxError::Fixed { mailbox, field, found, expected });
        }
        place.set(&mut rest, 0);
    }
    for (_, place) in M::FIELDS {
        place.set(&mut rest, 0);
    }
    match rest.iter().position(|byte| *byte != 0) {
        Some(byte) => Err(MailboxError::Reserved { mailbox, byte, bits: rest[byte] }),
        None => Ok(()),
    }
}

fn put<T: Value>(bytes: &mut [u8], field: Field, value: T) {
    let bits = value.to_bits();
    debug_assert!(bits <= field.most(), "{bits:#x} does not fit {field:?}");
    field.set(bytes, bits);
}

fn take<T: Value>(bytes: &[u8], field: Field) -> T {
    T::from_bits(field.get(bytes))
}

/// Defines a mailbox: a structure with a field for each that varies, and its tables.
macro_rules! mailbox {
    (
        $(#[$doc:meta])*
        $name:ident, $bytes:expr;
        fixed { $($fixed:ident: $fixed_place:expr => $value:expr;)* }
        fields { $($(#[$field_doc:meta])* $field:ident: $ty:ty => $place:expr;)* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }

        impl $crate::mailbox::Mailbox for $name {
            const NAME: &'static str = stringify!($name);
            const BYTES: usize = $bytes;
            const FIELDS: &'static [(&'static str, $crate::field::Field)] =
                &[$((stringify!($field), $place)),*];
            const FIXED: &'static [(&'static str, $crate::field::Field, u128)] =
                &[$((stringify!($fixed), $fixed_place, $value)),*];

            fn to_bytes(&self) -> Vec<u8> {
                let mut bytes = vec![0; Self::BYTES];
                for (_, place, value) in Self::FIXED {
                    place.set(&mut bytes, *value);
                }
                $($crate::mailbox::put(&mut bytes, $place, self.$field);)*
                bytes
            }

            fn from_bytes(bytes: &[u8]) -> Result<Self, $crate::mailbox::MailboxError> {
                $crate::mailbox::check::<Self>(bytes)?;
                Ok(Self::from_answer(bytes))
            }

            #[allow(unused_variables, reason = "a command may have nothing that varies")]
            fn from_answer(bytes: &[u8]) -> Self {
                Self { $($field: $crate::mailbox::take(bytes, $place)),* }
            }
        }
    };
}

use mailbox;

#[cfg(test)]
mod tests;
