//! Numbers and structures against `cubecl-hip-sys`, whose bindings were generated from AMD's headers.

use std::mem::offset_of;

use cubecl_hip_sys as theirs;
use tokenyard_sys_hip::{
    AccessDesc, AllocationFlags, AllocationProp, DeviceProp, IpcHandle, Location, Uuid, consts,
};

#[test]
fn structures_have_the_layout_of_the_headers() {
    let sizes = [
        (size_of::<Uuid>(), size_of::<theirs::hipUUID>()),
        (size_of::<Location>(), size_of::<theirs::hipMemLocation>()),
        (size_of::<AllocationFlags>(), size_of::<theirs::hipMemAllocationProp__bindgen_ty_2>()),
        (size_of::<AllocationProp>(), size_of::<theirs::hipMemAllocationProp>()),
        (size_of::<AccessDesc>(), size_of::<theirs::hipMemAccessDesc>()),
        (size_of::<IpcHandle>(), size_of::<theirs::hipIpcMemHandle_t>()),
        (size_of::<DeviceProp>(), size_of::<theirs::hipDeviceProp_tR0600>()),
    ];
    for (index, (ours, headers)) in sizes.into_iter().enumerate() {
        assert_eq!(ours, headers, "structure {index}");
    }
    let places = [
        (offset_of!(Location, id), offset_of!(theirs::hipMemLocation, id)),
        (
            offset_of!(AllocationProp, handle_kind),
            offset_of!(theirs::hipMemAllocationProp, __bindgen_anon_1),
        ),
        (offset_of!(AllocationProp, location), offset_of!(theirs::hipMemAllocationProp, location)),
        (offset_of!(AllocationProp, flags), offset_of!(theirs::hipMemAllocationProp, allocFlags)),
        (
            offset_of!(AllocationFlags, gpu_direct_rdma),
            offset_of!(theirs::hipMemAllocationProp__bindgen_ty_2, gpuDirectRDMACapable),
        ),
        (offset_of!(AccessDesc, flags), offset_of!(theirs::hipMemAccessDesc, flags)),
        (DeviceProp::ARCHITECTURE_AT, offset_of!(theirs::hipDeviceProp_tR0600, gcnArchName)),
    ];
    for (index, (ours, headers)) in places.into_iter().enumerate() {
        assert_eq!(ours, headers, "place {index}");
    }
}

#[test]
fn numbers_are_those_of_the_headers() {
    let pairs = [
        (consts::SUCCESS, theirs::HIP_SUCCESS),
        (consts::ERROR_OUT_OF_MEMORY, theirs::hipError_t_hipErrorOutOfMemory),
        (consts::ERROR_NO_DEVICE, theirs::hipError_t_hipErrorNoDevice),
        (consts::ERROR_NOT_READY, theirs::hipError_t_hipErrorNotReady),
        (
            consts::ATTRIBUTE_PROCESSORS,
            theirs::hipDeviceAttribute_t_hipDeviceAttributeMultiprocessorCount,
        ),
        (
            consts::ATTRIBUTE_SHARED_PER_BLOCK,
            theirs::hipDeviceAttribute_t_hipDeviceAttributeMaxSharedMemoryPerBlock,
        ),
        (consts::ATTRIBUTE_WAVE, theirs::hipDeviceAttribute_t_hipDeviceAttributeWarpSize),
        (
            consts::ATTRIBUTE_VMM,
            theirs::hipDeviceAttribute_t_hipDeviceAttributeVirtualMemoryManagementSupported,
        ),
        (consts::PEER_ATOMICS, theirs::hipDeviceP2PAttr_hipDevP2PAttrNativeAtomicSupported),
        (consts::MALLOC_UNCACHED, theirs::hipDeviceMallocUncached),
        (consts::MEM_ALLOCATION_PINNED, theirs::hipMemAllocationType_hipMemAllocationTypePinned),
        (
            consts::MEM_ALLOCATION_UNCACHED,
            theirs::hipMemAllocationType_hipMemAllocationTypeUncached,
        ),
        (
            consts::MEM_HANDLE_POSIX_FD,
            theirs::hipMemAllocationHandleType_hipMemHandleTypePosixFileDescriptor,
        ),
        (consts::MEM_LOCATION_DEVICE, theirs::hipMemLocationType_hipMemLocationTypeDevice),
        (consts::MEM_ACCESS_READ_WRITE, theirs::hipMemAccessFlags_hipMemAccessFlagsProtReadWrite),
        (
            consts::GRANULARITY_RECOMMENDED,
            theirs::hipMemAllocationGranularity_flags_hipMemAllocationGranularityRecommended,
        ),
        (consts::RANGE_HANDLE_DMABUF, theirs::hipMemRangeHandleType_hipMemRangeHandleTypeDmaBufFd),
        (consts::IPC_LAZY_PEER_ACCESS, theirs::hipIpcMemLazyEnablePeerAccess),
        (
            consts::HOST_MALLOC_COHERENT,
            theirs::hipHostMallocPortable
                | theirs::hipHostMallocMapped
                | theirs::hipHostMallocCoherent,
        ),
        (
            consts::HOST_REGISTER_MAPPED,
            theirs::hipHostRegisterPortable | theirs::hipHostRegisterMapped,
        ),
        (consts::MEMCPY_DEFAULT, theirs::hipMemcpyKind_hipMemcpyDefault),
        (consts::STREAM_NON_BLOCKING, theirs::hipStreamNonBlocking),
        (consts::EVENT_TIMED, theirs::hipEventDefault),
        (consts::EVENT_UNTIMED, theirs::hipEventDisableTiming),
        (consts::POOL_RELEASE_THRESHOLD, theirs::hipMemPoolAttr_hipMemPoolAttrReleaseThreshold),
        (
            consts::CAPTURE_THREAD_LOCAL,
            theirs::hipStreamCaptureMode_hipStreamCaptureModeThreadLocal,
        ),
        (consts::CAPTURE_RELAXED, theirs::hipStreamCaptureMode_hipStreamCaptureModeRelaxed),
        (consts::CAPTURE_STATUS_NONE, theirs::hipStreamCaptureStatus_hipStreamCaptureStatusNone),
        (consts::RTC_SUCCESS, theirs::hiprtcResult_HIPRTC_SUCCESS),
    ];
    for (index, (ours, headers)) in pairs.into_iter().enumerate() {
        assert_eq!(ours, headers, "number {index}");
    }
}
