//! Layout pins. Until 1.0 a host and a plugin must have been compiled against the same structures; the
//! hash of sizes and offsets shows whether they were. The compiler checks the literals, so a change of
//! a structure fails the build until the pin is renewed on purpose.

use core::mem::{offset_of, size_of};

use crate::*;

const fn mix(hash: u64, value: usize) -> u64 {
    // FNV-1a over the value's eight bytes: small, const, and good enough to distinguish layouts.
    let bytes = (value as u64).to_le_bytes();
    let mut hash = hash;
    let mut i = 0;
    while i < 8 {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        i += 1;
    }
    hash
}

/// A structure of this size with fields at these places.
macro_rules! hash_structure {
    ($hash:expr, $size:expr; $type:ty { $($field:ident),* $(,)? }) => {{
        let mut hash = mix($hash, $size);
        $( hash = mix(hash, offset_of!($type, $field)); )*
        hash
    }};
}

macro_rules! hash_layout {
    ($start:expr; $($type:ty { $($field:ident),* $(,)? })*) => {{
        let mut hash: u64 = $start;
        $( hash = hash_structure!(hash, size_of::<$type>(); $type { $($field),* }); )*
        hash
    }};
}

const fn common_layout() -> u64 {
    hash_layout! { 0xcbf2_9ce4_8422_2325;
        TyStr { data, bytes }
        TyError { size, os_errno, rank, operation, message }
        TyHost { size, context, log, find_transport }
        TyExportHeader { magic, major, minor, layout, size }
        TyConfig { size, text, file }
    }
}

/// The layout of a minor version, 8 or later. Versions only append, so an older structure ends where a newer field
/// begins.
const fn transport_layout(minor: u32) -> u64 {
    let hash = hash_layout! { common_layout();
        TyMemoryNeeds { size, kinds, handles, alignment }
        TyWindow { size, id, kind, pointer, bytes, fd, device, fd_offset, handle, reserved }
        TyCapabilities { size, flags, memory_kinds, max_peers, max_queues, max_signals,
            max_queue_depth, max_windows, largest_put }
        TyTransportNeeds { size, windows, queues, signals, queue_depth, largest_put, deadline_ns }
        TyTeam { size, me, count, world_ranks }
        TyCommand { op, reserved, flags, queue, peer, signal, add, src_window, dst_window,
            src_offset, dst_offset, bytes, value, tag }
        TyEvent { kind, queue, peer, status, tag }
    };
    hash_layout! { ring_layout(open_layout(hash, minor), minor);
        TyDeviceApi { size, version, dialect, compiler, flags, source, include_folders,
            include_folder_count, defines, define_count, params, param_bytes, param_alignment }
        TyTransportExport { header, components, count }
    }
}

/// The arguments of `open`, which have a device and an exchange since minor version 9. Before, a reserved word was
/// where the device is.
const fn open_layout(hash: u64, minor: u32) -> u64 {
    if minor < 9 {
        return hash_structure!(hash, offset_of!(TyTransportOpen, exchange); TyTransportOpen {
            size, config, team, needs, nics, nic_count, flags, device });
    }
    hash_layout! { hash;
        TyExchange { size, context, all_gather }
        TyTransportOpen { size, config, team, needs, nics, nic_count, flags, device, exchange }
    }
}

/// The table, which ends in `serve_ring` since minor version 10, with the structures of that slot. Their counters have
/// bytes since minor version 11. It ends in `device_api_of` since minor version 12.
const fn ring_layout(hash: u64, minor: u32) -> u64 {
    if minor < 10 {
        return hash_structure!(hash, offset_of!(TyTransportTable, serve_ring); TyTransportTable {
            size, name, version, about, probe, open, close, memory_needs, alloc, register, endpoint,
            connect, peer_address, post, poll, read_signal, health, progress, link_name, device_api,
            device_source, commit });
    }
    let hash = if minor < 12 {
        hash_structure!(hash, offset_of!(TyTransportTable, device_api_of); TyTransportTable {
            size, name, version, about, probe, open, close, memory_needs, alloc,
            register, endpoint, connect, peer_address, post, poll, read_signal, health, progress,
            link_name, device_api, device_source, commit, serve_ring })
    } else {
        hash_layout! { hash;
            TyTransportTable { size, name, version, about, probe, open, close, memory_needs, alloc,
                register, endpoint, connect, peer_address, post, poll, read_signal, health, progress,
                link_name, device_api, device_source, commit, serve_ring, device_api_of }
            TyFirst { size, window, queue, signal, reserved }
        }
    };
    let hash = hash_layout! { hash;
        TyServeRing { size, ring, counters, raised, windows, window_count, largest_put, peers, reserved }
    };
    let hash = if minor < 11 {
        hash_structure!(hash, offset_of!(TyPeerCounters, bytes); TyPeerCounters {
            posted, done, raised, expected, received })
    } else {
        hash_layout! { hash; TyPeerCounters { posted, done, raised, expected, received, bytes } }
    };
    hash_layout! { hash;
        TyGpuRingCommand { op, peer, signal, add, src_window, dst_window, src_offset, dst_offset, bytes,
            value, sequence }
        TyGpuRingStatus { done, failed, status }
        TyGpuRing { size, level, queue, capacity, commands, status, totals, signals, reserved }
    }
}

const fn topology_layout() -> u64 {
    hash_layout! { common_layout();
        TyPlace { size, host, device, numa_node, processors, flags, nic_count, reserved, nics,
            missing_nic }
        TyDiscover { size, config, rank, ranks, local_rank, reserved }
        TyTopologyTable { size, name, version, about, discover }
        TyTopologyExport { header, components, count }
    }
}

const fn kernels_layout() -> u64 {
    hash_layout! { transport_layout(TY_TRANSPORT_MINOR);
        TyTensor { data, dtype, reserved, shape, stride }
        TyShape { size, rank, ranks, domains, experts, topk, hidden, max_tokens, in_flight, handles,
            runs, message_bytes, entries, layers, reserved }
        TyLimits { size, scale_up, scale_out }
        TyLinkNeeds { queues, signals, queue_depth, reserved, largest_put }
        TyKernelNeeds { size, windows, capabilities, scale_up, scale_out, window_bytes, device, reserved,
            window_levels }
        TyLink { table, instance, capabilities }
        TyWaitBoard { abort, phase, peer, signal, expected, found, since_ns, operation, level,
            gave_up, waited_ns, ranks }
        TyPlan { size, scale_up, scale_out, windows, window_count, board, cap_ns, lost }
        TyRefusal { text, rank, is_full }
        TyDispatch { size, operation, handle, flags, layout, alignment, cast, max_tokens, exchange,
            sms, x, scales, topk_idx, topk_weights, refusal, stream, tokens, expert_totals, waited_ns,
            max_rows }
        TyReceived { size, region, tokens, rows, x, scales, ids, weights, source, slots,
            expert_counts, expert_starts, expert_ends, source_counts, source_ends, ranges, totals, lost,
            dropped, overflow }
        TyCombine { size, operation, handle, flags, exchange, sms, x, weights, beside, bias0, bias1,
            out, out_weights, missing, refusal, stream, topk_weights, topk_idx, waited_ns }
        TyCopy { from, to, elements, room, columns, modulus, fill, flags }
        TyCopies { size, copies, count, flags, totals, stream }
        TyRoutingCounts { size, topk_idx, experts, ranks, rank_tokens, expert_tokens, is_token_in_rank,
            stream }
        TyAgree { size, operation, exchange, is_combine, refusal }
        TyKernelsTable { size, name, version, about, probe, open, close, needs, allocate, plan,
            submit, finish, query, flush, release, device }
        TyMask { size, rank, is_masked }
        TyMasks { size, masks, count, reserved }
        TyMessage { size, data, bytes, peer, reserved, refusal }
        TyPart { data, bytes }
        TyGather { size, operation, parts, count, refusal, flags, stream }
        TyReduce { size, operation, tensors, count, precision, scale, refusal, flags }
        TyEntries { size, layer, reserved, counts, parts }
        TyFetch { size, operation, layer, index_bytes, indices, count, parts }
        TyReleaseAfter { size, stream }
        TyDispatchOutput { size, operation, received }
        TyCombineEnd { size, operation }
        TyCombineInput { size, handle, dtype, region, tensor }
        TyExpertCounts { size, operation, counts, count, reserved }
        TyOperationTrace { size, operation, trace }
        TyDeviceTable { size, tensor_alloc, tensor_free, copy, stream_create, stream_destroy, copy_on,
            graph_begin, graph_end, graph_launch, graph_destroy }
        TyRaised { signal, total }
        TyCounters { size, ranks, signals, queue_depth, peers, raised }
        TyTrace { size, begun, counted, entered, moved, arrived }
        TyKernelsExport { header, components, count }
    }
}

/// Layout hash of the transport ABI on 64-bit targets.
pub const TY_TRANSPORT_LAYOUT: u64 = 0x1c03_1776_4461_33ca;
/// Layout hash of the topology ABI on 64-bit targets.
pub const TY_TOPOLOGY_LAYOUT: u64 = 0x8fee_3cc4_13c3_52a7;
/// Layout hash of the kernel set ABI on 64-bit targets.
pub const TY_KERNELS_LAYOUT: u64 = 0xe56c_be1f_293b_917a;

/// Layout hashes of the transport ABI of minor versions 8 to 11, which this version only appends to. For hosts: the C
/// header has constants alone.
pub const fn earlier_transport_layouts() -> [u64; 4] {
    [0xb97d_f693_70ec_42f2, 0x1f42_33b5_e271_0022, 0x51e1_d782_0a0f_b43a, 0x9c60_85ef_85af_22ca]
}

const _: () = assert!(
    TY_TRANSPORT_LAYOUT == transport_layout(TY_TRANSPORT_MINOR),
    "transport ABI changed: re-pin"
);
const _: () = assert!(TY_TOPOLOGY_LAYOUT == topology_layout(), "topology ABI changed: re-pin");
const _: () = assert!(TY_KERNELS_LAYOUT == kernels_layout(), "kernel set ABI changed: re-pin");
const _: () = assert!(size_of::<TyCommand>() == 64);
const _: () = assert!(size_of::<TyGpuRingCommand>() == 64);
const _: () = assert!(size_of::<TyEvent>() == 24);
const _: () = assert!(size_of::<TyError>() == 512);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_pins_are_what_the_structures_hash_to() {
        assert_eq!(
            (TY_TRANSPORT_LAYOUT, TY_TOPOLOGY_LAYOUT, TY_KERNELS_LAYOUT),
            (transport_layout(TY_TRANSPORT_MINOR), topology_layout(), kernels_layout())
        );
    }

    #[test]
    fn this_version_only_appends_to_the_transport_structures_of_minor_versions_8_to_11() {
        assert_eq!(earlier_transport_layouts(), [8, 9, 10, 11].map(transport_layout));
    }
}
