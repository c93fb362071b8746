//! The checks of a call before it begins: its handle, and whether the kernel set takes its form.

use super::arguments::{Combine, Dispatch, PackedForms, Sizes, refuse};
use super::components::{CallForm, Components};
use super::output::{Handle, Received};
use crate::moe::combine::compression::LOGFMT10;
use crate::moe::{Compression, Layout};
use crate::{Error, ErrorKind, Result};

impl Components {
    /// Checks for an M that differs from the communicator's.
    pub(super) fn check_call_tokens(&self, dispatch: &Dispatch<'_>) -> Result<()> {
        let is_own = dispatch.max_tokens.is_some_and(|most| most != self.shape.max_tokens);
        self.check_form(is_own, CallForm::CallTokens, "max_tokens of a call")
    }

    pub(super) fn check_layout(&self, layout: Layout) -> Result<()> {
        if !matches!(layout, Layout::RankMajor { .. })
            || self.user.takes(CallForm::RankMajor.bits())
        {
            return Ok(());
        }
        Err(self.not_taken("layout: found rank-major; expected flat, expert-major or packed"))
    }

    /// Checks the cap on the rows of a dispatch.
    pub(super) fn check_row_cap(&self, dispatch: &Dispatch<'_>) -> Result<()> {
        let Some(cap) = dispatch.cap else { return Ok(()) };
        self.check_form(true, CallForm::RowCap, "max_rows of a call")?;
        let (rows, layout) = (cap.rows, dispatch.layout);
        if rows == 0 {
            return refuse("max_rows: found 0; expected at least 1, or none for no cap".into());
        }
        if layout.has_fixed_places() {
            return refuse(format!(
                "max_rows: found {rows} with {} rows, whose places do not depend on counts; expected none, or the flat \
                 or expert-major layout",
                layout.name()
            ));
        }
        if dispatch.sizes == Sizes::WorstCase && !cap.drops() {
            return refuse(format!(
                "overflow: found an error beyond max_rows = {rows} with worst-case sizes; expected rows to be dropped, \
                 or exact sizes, for which rows are counted before they move"
            ));
        }
        Ok(())
    }

    pub(super) fn check_packed_forms(&self, forms: PackedForms, layout: Layout) -> Result<()> {
        forms.check(layout)?;
        let PackedForms { scales, source } = PackedForms::default();
        self.check_form(forms.scales != scales, CallForm::PackedForms, "scale_layout")?;
        self.check_form(forms.source != source, CallForm::PackedForms, "source_index")
    }

    pub(super) fn check_combine_form(&self, combine: &Combine<'_>, layout: Layout) -> Result<()> {
        let form = match layout {
            Layout::Packed => CallForm::PackedSums,
            Layout::Flat | Layout::ExpertMajor { .. } | Layout::RankMajor { .. } => {
                CallForm::RoundOnce
            }
        };
        self.check_form(combine.topk.is_some(), form, "topk of a combine")?;
        self.check_form(combine.round_once, form, "round_once")?;
        self.check_form(combine.sum_weights, CallForm::SumWeights, "sum_weights")?;
        let is_coded = combine.compression == Compression::LogFmt10;
        self.check_form(is_coded, CallForm::LogFmt10, LOGFMT10)
    }

    pub(super) fn check_beside(&self, is_asked: bool, what: &str) -> Result<()> {
        self.check_form(is_asked, CallForm::RoundOnce, what)
    }

    /// Checks that the kernel set takes the form of a call.
    fn check_form(&self, is_asked: bool, form: CallForm, what: &str) -> Result<()> {
        if !is_asked || self.user.takes(form.bits()) {
            return Ok(());
        }
        Err(self.not_taken(&format!("{what}: found some; expected none")))
    }

    /// The error of a form that the kernel set does not take.
    fn not_taken(&self, what: &str) -> Error {
        let text = format!("{what}: kernel set `{}` does not take it yet", self.kernels().name());
        Error::new(ErrorKind::Unsupported, "check arguments", text)
    }

    pub(super) fn check_handle(&self, handle: &Handle) -> Result<()> {
        if !std::ptr::eq(&*handle.routing.components, self) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "check handle",
                "the handle belongs to another communicator",
            ));
        }
        Ok(())
    }

    /// Checks that an output is of this communicator.
    pub(crate) fn check_output(&self, received: &Received) -> Result<()> {
        if !received.is_of(self) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "copy output",
                "the output belongs to another communicator",
            ));
        }
        Ok(())
    }
}
