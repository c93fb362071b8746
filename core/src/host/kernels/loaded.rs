//! The C form of calls, for a kernel set whose calls all go through its table.

use super::OpenKernels;
use crate::call::CForm;
use crate::kernels::{KernelCall, kernel_calls};
use crate::{Result, abi};

macro_rules! make_loaded {
    ($life:lifetime
        submit { $($submit:ident($argument:ty) = $submit_name:literal, $submit_tag:ident;)* }
        finish { $($finish:ident($end:ty) = $finish_name:literal, $finish_tag:ident;)* }
        query { $($query:ident($answer:ty) = $query_name:literal, $query_tag:ident;)* }
    ) => {
            /// Makes a call through the table.
            ///
            /// # Errors
            /// Errors of the component.
            ///
            /// # Safety
            /// As the method of [`KernelSet`](crate::kernels::KernelSet).
            pub(super) unsafe fn make_loaded(
                kernels: &mut OpenKernels,
                call: KernelCall<'_>,
            ) -> Result<()> {
                match call {
                    $(KernelCall::$submit(call) => {
                        let form = call.as_abi();
                        // SAFETY: an open instance of a judged table, and the structure of this tag, valid for the
                        // call; the rest by this function's contract.
                        kernels.call($submit_name, |t, i, e| unsafe {
                            t.submit.map(|f| f(i, abi::$submit_tag, (&raw const form).cast(), e))
                        })
                    })*
                    $(KernelCall::$finish(end) => {
                        // SAFETY: as above.
                        kernels.call($finish_name, |t, i, e| unsafe {
                            t.finish.map(|f| f(i, abi::$finish_tag, std::ptr::from_mut(end).cast(), e))
                        })
                    })*
                    $(KernelCall::$query(answer) => {
                        // SAFETY: as above.
                        kernels.call($query_name, |t, i, e| unsafe {
                            t.query.map(|f| f(i, abi::$query_tag, std::ptr::from_mut(answer).cast(), e))
                        })
                    })*
                }
            }
    };
}
kernel_calls!(make_loaded);
