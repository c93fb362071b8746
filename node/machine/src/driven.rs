//! The GPU that a rank drives, as far as files and the environment show.

use crate::{Fact, Gpu, GpuVendor, Machine};

/// The variables that select GPUs, in the order in which they apply.
const NVIDIA: [&str; 1] = ["CUDA_VISIBLE_DEVICES"];
const AMD: [&str; 2] = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"];

/// The GPU of a rank and its ordinal, as the rank's programs count; nothing where the node has none, or
/// none for this rank.
///
/// # Errors
/// The reason why it is unknown, in words for people.
pub fn gpu_of_rank(machine: &Machine, local_rank: u32) -> Result<Option<(u32, &Gpu)>, String> {
    let visible = |vendor| machine.gpus.iter().filter(move |g| g.vendor == vendor && g.is_visible);
    let mut gpus: Vec<&Gpu> = visible(GpuVendor::Nvidia).collect();
    let mut variables = &NVIDIA[..];
    if gpus.is_empty() {
        gpus = visible(GpuVendor::Amd).collect();
        variables = &AMD[..];
    }
    let environment = &machine.container.environment;
    let mut is_selected = false;
    for name in variables {
        if let Some(list) = environment.get(*name) {
            gpus = select(&gpus, list).map_err(|item| {
                format!("{name} names `{item}`, which is no GPU that this process sees")
            })?;
            is_selected = true;
        }
    }
    if gpus.iter().any(|gpu| gpu.mig == Fact::Known(true)) {
        return Err("GPUs are split into instances (MIG)".to_owned());
    }
    let is_mixed = gpus.windows(2).any(|pair| pair[0].device_id != pair[1].device_id);
    let in_order = environment.get("CUDA_DEVICE_ORDER").is_some_and(|order| order == "PCI_BUS_ID");
    if is_mixed && variables == NVIDIA && !in_order {
        return Err("GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID".to_owned());
    }
    // Where a launcher gives each rank one GPU, that GPU has the ordinal 0.
    let ordinal = if is_selected && gpus.len() == 1 { 0 } else { local_rank };
    Ok(gpus.get(ordinal as usize).map(|gpu| (ordinal, *gpu)))
}

/// The GPUs of a list of indices or unique names, which may be cut short; or the item that is neither.
fn select<'a>(gpus: &[&'a Gpu], list: &str) -> Result<Vec<&'a Gpu>, String> {
    let items = list.split(',').map(str::trim).filter(|item| !item.is_empty());
    items
        .map(|item| {
            let named = |gpu: &&&Gpu| {
                item.starts_with("GPU-") && gpu.uuid.known().is_some_and(|id| id.starts_with(item))
            };
            let found = match item.parse::<usize>() {
                Ok(index) => gpus.get(index),
                Err(_) => gpus.iter().find(named),
            };
            found.copied().ok_or_else(|| item.to_owned())
        })
        .collect()
}
