//! The needs of a kernel set, checked.

use super::OpenKernels;
use crate::host::missing_slot;
use crate::kernels::{KernelNeeds, Limits, LinkNeeds, is_for_level};
use crate::transport::Capabilities;
use crate::{Error, ErrorKind, Result, abi};

/// Checks what a kernel set asked for.
///
/// # Errors
/// Needs beyond the limits; needs that make no sense.
pub(super) fn check(kernels: &OpenKernels, limits: &Limits, needs: &KernelNeeds) -> Result<()> {
    check_window_levels(kernels, needs)?;
    for (name, level, limits, link) in [
        ("scale-up", abi::TY_LEVEL_SCALE_UP, &limits.scale_up, &needs.scale_up),
        ("scale-out", abi::TY_LEVEL_SCALE_OUT, &limits.scale_out, &needs.scale_out),
    ] {
        let windows = (0..needs.windows.min(abi::TY_MAX_WINDOWS as u32))
            .filter(|window| is_for_level(needs, *window, level));
        check_level(kernels, name, limits, windows.count() as u32, link)?;
    }
    let known = abi::TY_KERNELS_CAP_MASKING
        | abi::TY_KERNELS_CAP_STREAMS
        | abi::TY_KERNELS_CAP_NO_SYNC
        | abi::TY_KERNELS_CAP_CALL_TOKENS
        | abi::TY_KERNELS_CAP_ROUND_ONCE
        | abi::TY_KERNELS_CAP_SUM_WEIGHTS
        | abi::TY_KERNELS_CAP_NO_REGION
        | abi::TY_KERNELS_CAP_PACKED_SUMS
        | abi::TY_KERNELS_CAP_STATISTICS
        | abi::TY_KERNELS_CAP_PACKED_FORMS
        | abi::TY_KERNELS_CAP_LOGFMT10
        | abi::TY_KERNELS_CAP_MASKS
        | abi::TY_KERNELS_CAP_RANK_MAJOR
        | abi::TY_KERNELS_CAP_ROW_CAP
        | abi::TY_KERNELS_CAP_PIPE
        | abi::TY_KERNELS_CAP_GATHER
        | abi::TY_KERNELS_CAP_TABLE
        | abi::TY_KERNELS_CAP_REDUCE;
    let unknown = needs.capabilities & !known;
    if unknown != 0 {
        let text = format!(
            "found needs with the capabilities {unknown:#x}, which this core does not know"
        );
        return Err(Error::new(ErrorKind::Plugin, "needs", text)
            .with_context("component", kernels.name())
            .with_fix("use a kernel set that was made for this version"));
    }
    check_device(kernels, needs)
}

/// Checks that the levels of windows are known, and that there are not too many windows.
fn check_window_levels(kernels: &OpenKernels, needs: &KernelNeeds) -> Result<()> {
    let known = 1 << abi::TY_LEVEL_SCALE_UP | 1 << abi::TY_LEVEL_SCALE_OUT;
    let windows = needs.window_levels.iter().take(needs.windows as usize);
    let unknown = windows.fold(0, |all, levels| all | levels) & !known;
    if unknown == 0 && needs.windows as usize <= abi::TY_MAX_WINDOWS {
        return Ok(());
    }
    let text = format!(
        "found {} windows, for unknown levels {unknown:#x}; expected at most {}, for levels 0 and 1",
        needs.windows,
        abi::TY_MAX_WINDOWS
    );
    Err(Error::new(ErrorKind::Plugin, "needs", text).with_context("component", kernels.name()))
}

/// Checks that a set that works on a device has the whole device table, and that only such a set has
/// streams and graphs.
fn check_device(kernels: &OpenKernels, needs: &KernelNeeds) -> Result<()> {
    let (streams, no_sync) = (abi::TY_KERNELS_CAP_STREAMS, abi::TY_KERNELS_CAP_NO_SYNC);
    let broken = if needs.capabilities & no_sync != 0 && needs.capabilities & streams == 0 {
        "found TY_KERNELS_CAP_NO_SYNC alone; expected TY_KERNELS_CAP_STREAMS with it"
    } else if needs.capabilities & streams != 0 && needs.device < 0 {
        "found TY_KERNELS_CAP_STREAMS on the host; expected a device"
    } else if needs.device >= 0 {
        return check_device_table(kernels);
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Plugin, "needs", broken)
        .with_context("component", kernels.name())
        .with_fix("report it to the author of the kernel set"))
}

fn check_device_table(kernels: &OpenKernels) -> Result<()> {
    let whole = size_of::<abi::TyDeviceTable>();
    let Some(table) = kernels.device().filter(|table| table.size >= whole) else {
        return Err(missing_slot(kernels.name(), "device"));
    };
    for (slot, is_missing) in [
        ("tensor_alloc", table.tensor_alloc.is_none()),
        ("tensor_free", table.tensor_free.is_none()),
        ("copy", table.copy.is_none()),
        ("stream_create", table.stream_create.is_none()),
        ("stream_destroy", table.stream_destroy.is_none()),
        ("copy_on", table.copy_on.is_none()),
        ("graph_begin", table.graph_begin.is_none()),
        ("graph_end", table.graph_end.is_none()),
        ("graph_launch", table.graph_launch.is_none()),
        ("graph_destroy", table.graph_destroy.is_none()),
    ] {
        if is_missing {
            return Err(missing_slot(kernels.name(), slot));
        }
    }
    Ok(())
}

fn check_level(
    kernels: &OpenKernels,
    level: &str,
    limits: &Capabilities,
    windows: u32,
    link: &LinkNeeds,
) -> Result<()> {
    let windows = if link.queues == 0 { 0 } else { windows };
    for (what, wanted, limit) in [
        ("windows", windows.into(), limits.max_windows.min(abi::TY_MAX_WINDOWS as u32).into()),
        ("queues", u64::from(link.queues), u64::from(limits.max_queues)),
        ("signals", link.signals.into(), limits.max_signals.into()),
        ("queue depth", link.queue_depth.into(), limits.max_queue_depth.into()),
        ("bytes of a put", link.largest_put, limits.largest_put),
    ] {
        if wanted > limit {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "plan needs",
                format!(
                    "kernel set `{}` needs {wanted} {what}; the {level} transport has {limit}",
                    kernels.name()
                ),
            )
            .with_fix("choose a smaller shape or another transport"));
        }
    }
    Ok(())
}
