//! The order of a call, and whether a kernel set takes it.

use super::arguments::Sizes;
use super::components::Components;
use super::memory::{Argument, check_memory};
use super::stream::{Statistics, Stream};
use super::tensor::TensorRef;
use crate::call::{CallOrder, CombineCall, DispatchCall};
use crate::moe::{DType, Layout};
use crate::{Error, ErrorKind, Result, abi};

/// An address in a tensor that the device writes, or null.
fn written<T>(tensor: Option<TensorRef<'_>>) -> *mut T {
    tensor.map_or(std::ptr::null_mut(), |t| t.raw().data.cast())
}

/// The order of a call, and whether the host waits for it. The default is that of plain calls.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mode<'a> {
    pub(super) stream: Option<Stream>,
    pub(super) no_sync: bool,
    pub(super) tokens: Option<TensorRef<'a>>,
    pub(super) statistics: Statistics<'a>,
    /// 0: the kernel set's own number.
    pub(super) sms: u32,
    /// One call sends and receives the operation.
    is_at_once: bool,
}

impl Mode<'_> {
    /// The mode of calls in the order of a stream.
    pub(super) fn on(stream: Stream) -> Self {
        Self { stream: Some(stream), ..Self::default() }
    }

    /// The mode of a call that sends and receives an operation.
    pub(super) fn at_once(self) -> Self {
        Self { is_at_once: true, ..self }
    }

    pub(super) fn order(&self) -> CallOrder {
        let stream = self.stream.map(Stream::raw);
        let no_sync = self.no_sync && stream.is_some();
        // A refused call goes on in this order, too.
        let sms = if self.sms > MOST_SMS { 0 } else { self.sms };
        CallOrder { stream, no_sync, at_once: self.is_at_once, sms }
    }

    pub(super) fn mark_dispatch(&self, call: &mut DispatchCall<'_>, sizes: Sizes) -> Result<()> {
        if self.no_sync && sizes == Sizes::Exact {
            return refuse(
                "sizes: found exact; expected worst-case, because the host does not wait for counts",
            );
        }
        call.tokens = self.tokens.map_or(std::ptr::null(), |t| t.raw().data.cast_const().cast());
        call.expert_totals = written(self.statistics.expert_totals);
        call.waited_ns = written(self.statistics.waited_ns);
        self.check_packed(call.layout == Layout::Packed)
    }

    fn check_packed(&self, is_packed: bool) -> Result<()> {
        if is_packed || self.statistics.is_empty() {
            return Ok(());
        }
        refuse("statistics: found some; expected none but in the packed layout")
    }

    pub(super) fn check_replay(&self) -> Result<()> {
        if !self.statistics.is_empty() {
            return refuse("statistics: found some; expected none in a replay");
        }
        self.check_no_tokens()
    }

    pub(super) fn mark_combine(&self, call: &mut CombineCall<'_>, layout: Layout) -> Result<()> {
        call.order = self.order();
        call.waited_ns = written(self.statistics.waited_ns);
        self.check_packed(layout == Layout::Packed)?;
        self.check_no_tokens()
    }

    fn check_no_tokens(&self) -> Result<()> {
        match self.tokens {
            None => Ok(()),
            Some(_) => refuse("tokens: found some; expected none, because T is that of the handle"),
        }
    }
}

fn refuse(text: &str) -> Result<()> {
    Err(Error::new(ErrorKind::InvalidInput, "check arguments", text))
}

/// More than any device has.
const MOST_SMS: u32 = 1024;

fn check_sms(sms: u32) -> Result<()> {
    match sms <= MOST_SMS {
        true => Ok(()),
        false => refuse(&format!("sms: found {sms}; expected 0 to {MOST_SMS}")),
    }
}

impl Components {
    /// Puts a call in its order before anything else is checked: a refusal goes in the same order.
    pub(super) fn order(&self, call: &mut DispatchCall<'_>, mode: &Mode<'_>) -> Result<()> {
        self.check_order(mode)?;
        call.order = mode.order();
        self.check_mode(mode)
    }

    /// Whether the kernel set takes calls in this order.
    pub(super) fn check_order(&self, mode: &Mode<'_>) -> Result<()> {
        self.check_stream(mode.stream).and_then(|()| self.check_no_sync(mode.no_sync))
    }

    /// Checks the tensors of a mode.
    pub(super) fn check_mode(&self, mode: &Mode<'_>) -> Result<()> {
        check_sms(mode.sms)
            .and_then(|()| self.check_tokens(mode))
            .and_then(|()| self.check_statistics(&mode.statistics))
    }

    fn check_statistics(&self, statistics: &Statistics<'_>) -> Result<()> {
        if statistics.is_empty() {
            return Ok(());
        }
        if !self.user.takes(abi::TY_KERNELS_CAP_STATISTICS) {
            return refuse("statistics: found some; expected none: the kernel set writes none");
        }
        let Statistics { expert_totals, waited_ns } = *statistics;
        let arguments = [("expert_totals", expert_totals), ("waited_ns", waited_ns)];
        check_memory(&arguments.map(|(name, t)| Argument::other(name, t)), self.user.device)?;
        let is = |tensor: Option<TensorRef<'_>>, rows: u32, dtype: DType| {
            let fits = |t: TensorRef<'_>| {
                [t.rows(), t.cols()] == [rows as usize, 1]
                    && t.dtype() == Some(dtype)
                    && t.is_contiguous()
            };
            tensor.is_none_or(fits)
        };
        if !is(expert_totals, self.shape.local_experts(), DType::I32) {
            return refuse(
                "expert_totals: found another tensor; expected i32 [E/R, 1], contiguous",
            );
        }
        if !is(waited_ns, self.shape.ranks, DType::I64) {
            return refuse("waited_ns: found another tensor; expected i64 [R, 1], contiguous");
        }
        Ok(())
    }

    pub(crate) fn check_stream(&self, stream: Option<Stream>) -> Result<()> {
        if stream.is_none() || self.user.takes(abi::TY_KERNELS_CAP_STREAMS) {
            return Ok(());
        }
        let text = format!(
            "stream: found one; expected none, because kernel set `{}` has no streams",
            self.kernels().name()
        );
        Err(Error::new(ErrorKind::InvalidInput, "check arguments", text)
            .with_fix("call the communicator itself, or use a kernel set of a device"))
    }

    fn check_no_sync(&self, no_sync: bool) -> Result<()> {
        if !no_sync || self.user.takes(abi::TY_KERNELS_CAP_NO_SYNC) {
            return Ok(());
        }
        let text = format!(
            "without_sync: found it; expected a call that waits: kernel set `{}` has no others over {}",
            self.kernels().name(),
            self.user.transports
        );
        let fix = "leave it out; GPUs of one domain over a transport that loads and stores, such as nvlink, \
                   take such calls";
        Err(Error::new(ErrorKind::InvalidInput, "check arguments", text).with_fix(fix))
    }

    fn check_tokens(&self, mode: &Mode<'_>) -> Result<()> {
        let Some(tokens) = &mode.tokens else { return Ok(()) };
        if !mode.no_sync {
            return refuse("tokens: found some; expected none but without synchronisation");
        }
        check_memory(&[Argument::other("tokens", Some(*tokens))], self.user.device)?;
        let one = [tokens.rows(), tokens.cols()] == [1, 1] && tokens.dtype() == Some(DType::I32);
        if one { Ok(()) } else { refuse("tokens: found another tensor; expected one i32") }
    }
}
