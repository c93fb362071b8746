//! Numbers of HIP, the same in ROCm 6 and 7 unless stated otherwise.

use std::ffi::c_uint;

/// `hipSuccess`.
pub const SUCCESS: c_uint = 0;
/// `hipErrorOutOfMemory`.
pub const ERROR_OUT_OF_MEMORY: c_uint = 2;
/// `hipErrorNoDevice`.
pub const ERROR_NO_DEVICE: c_uint = 100;
/// `hipErrorNotReady`: the queried work has not ended.
pub const ERROR_NOT_READY: c_uint = 600;

/// `hipDeviceAttributeMultiprocessorCount`.
pub const ATTRIBUTE_PROCESSORS: c_uint = 63;
/// `hipDeviceAttributeMaxSharedMemoryPerBlock`.
pub const ATTRIBUTE_SHARED_PER_BLOCK: c_uint = 74;
/// `hipDeviceAttributeWarpSize`.
pub const ATTRIBUTE_WAVE: c_uint = 87;
/// `hipDeviceAttributeVirtualMemoryManagementSupported`.
pub const ATTRIBUTE_VMM: c_uint = 89;
/// `hipDevP2PAttrNativeAtomicSupported`.
pub const PEER_ATOMICS: c_uint = 2;

/// `hipDeviceMallocUncached`: peers see stores while a kernel runs.
pub const MALLOC_UNCACHED: c_uint = 3;
/// `hipMemAllocationTypePinned`.
pub const MEM_ALLOCATION_PINNED: c_uint = 1;
/// `hipMemAllocationTypeUncached`: ROCm 7.1 and newer.
pub const MEM_ALLOCATION_UNCACHED: c_uint = 0x4000_0000;
/// `hipMemHandleTypePosixFileDescriptor`.
pub const MEM_HANDLE_POSIX_FD: c_uint = 1;
/// The first version, as `hipRuntimeGetVersion` counts, whose memory of that kind peers see: HIP 7.0 has it not.
pub const FIRST_VMM_UNCACHED: i32 = 70_051_832;
/// `hipMemAllocationGranularityRecommended`.
pub const GRANULARITY_RECOMMENDED: c_uint = 1;
/// `hipMemRangeHandleTypeDmaBufFd`.
pub const RANGE_HANDLE_DMABUF: c_uint = 1;
/// `hipIpcMemLazyEnablePeerAccess`: the only flag of an opened handle.
pub const IPC_LAZY_PEER_ACCESS: c_uint = 1;
/// `hipHostMallocPortable`, `hipHostMallocMapped` and `hipHostMallocCoherent`: a device's stores are seen while
/// its kernel runs.
pub const HOST_MALLOC_COHERENT: c_uint = 0x1 | 0x2 | 0x4000_0000;
/// `hipHostRegisterPortable` and `hipHostRegisterMapped`.
pub const HOST_REGISTER_MAPPED: c_uint = 0x1 | 0x2;
/// `hipMemcpyDefault`: HIP finds out of which kind each place is.
pub const MEMCPY_DEFAULT: c_uint = 4;
/// `hipStreamNonBlocking`.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `hipEventDefault`: it records a time.
pub const EVENT_TIMED: c_uint = 0;
/// `hipEventDisableTiming`.
pub const EVENT_UNTIMED: c_uint = 2;
/// `hipMemLocationTypeDevice`.
pub const MEM_LOCATION_DEVICE: c_uint = 1;
/// `hipMemAccessFlagsProtReadWrite`.
pub const MEM_ACCESS_READ_WRITE: c_uint = 3;
/// `hipMemPoolAttrReleaseThreshold`.
pub const POOL_RELEASE_THRESHOLD: c_uint = 4;
/// `hipStreamCaptureModeThreadLocal`.
pub const CAPTURE_THREAD_LOCAL: c_uint = 1;
/// `hipStreamCaptureModeRelaxed`.
pub const CAPTURE_RELAXED: c_uint = 2;
/// `hipStreamCaptureStatusNone`.
pub const CAPTURE_STATUS_NONE: c_uint = 0;

/// `HIPRTC_SUCCESS`.
pub const RTC_SUCCESS: c_uint = 0;
