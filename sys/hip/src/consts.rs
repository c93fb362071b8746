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
/// `hipErrorNotSupported`.
pub const ERROR_NOT_SUPPORTED: c_uint = 801;

/// `hipDeviceAttributeMultiprocessorCount`.
pub const ATTRIBUTE_PROCESSORS: c_uint = 63;
/// `hipDeviceAttributeMaxSharedMemoryPerBlock`.
pub const ATTRIBUTE_SHARED_PER_BLOCK: c_uint = 74;
/// `hipDeviceAttributeWarpSize`.
pub const ATTRIBUTE_WAVE: c_uint = 87;
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
/// `hipMemLocationTypeDevice`.
pub const MEM_LOCATION_DEVICE: c_uint = 1;
/// `hipMemAccessFlagsProtReadWrite`.
pub const MEM_ACCESS_READ_WRITE: c_uint = 3;
/// `hipMemPoolAttrReleaseThreshold`.
pub const POOL_RELEASE_THRESHOLD: c_uint = 4;
/// `hipStreamCaptureModeThreadLocal`.
pub const CAPTURE_THREAD_LOCAL: c_uint = 1;
