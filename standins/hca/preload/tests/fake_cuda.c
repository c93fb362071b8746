// The functions of NVIDIA's driver that the stand-in of the kernel calls, for tests without a GPU. Its "GPU memory" is
// at addresses that the processor cannot access, with the bytes elsewhere: only copies of this library reach them.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, BYTES = 4 << 20, HOST_KIND = 1, DEVICE_KIND = 2 };

static char *device, *bytes, *pinned;
static size_t used, pinned_bytes;
static __thread int depth;

// For the test: memory of the GPU, and the bytes behind an address of it.
void *fake_alloc(size_t count) {
    if (!device) {
        device = mmap(0, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        bytes = calloc(1, BYTES);
    }
    void *at = device + used;
    used += count;
    return at;
}
char *fake_bytes(void *at) { return bytes + ((char *)at - device); }

static char *behind(uint64_t at, size_t count) {
    uint64_t offset = at - (uint64_t)device;
    return device && offset < BYTES && count <= BYTES - offset ? bytes + offset : 0;
}

unsigned cuPointerGetAttribute(void *out, unsigned which, uint64_t at) {
    if (!depth) return INVALID_CONTEXT;
    int is_pinned = pinned && at - (uint64_t)pinned < pinned_bytes;
    if (!is_pinned && !behind(at, 1)) return INVALID_VALUE;
    // The kind of the memory, and the ordinal of the device.
    *(int *)out = which == 2 ? (is_pinned ? HOST_KIND : DEVICE_KIND) : 0;
    return which == 2 || which == 9 ? 0 : INVALID_VALUE;
}
unsigned cuDeviceGetCount(int *out) { return *out = 1, 0; }
unsigned cuDevicePrimaryCtxGetState(int of, unsigned *flags, int *active) {
    return (void)of, *flags = 0, *active = 1, 0;
}
unsigned cuDeviceGet(int *out, int ordinal) { return *out = ordinal, ordinal ? 101 : 0; }
unsigned cuDevicePrimaryCtxRetain(void **out, int of) { return (void)of, *out = &depth, 0; }
unsigned cuCtxPushCurrent_v2(void *context) { return (void)context, depth++, 0; }
unsigned cuCtxPopCurrent_v2(void **out) { return *out = 0, depth--, 0; }
unsigned cuStreamCreate(void **out, unsigned flags) {
    // One that does not wait for others.
    *out = &bytes;
    return depth && flags == 1 ? 0 : INVALID_CONTEXT;
}
unsigned cuStreamSynchronize(void *stream) { return (void)stream, depth ? 0 : INVALID_CONTEXT; }
unsigned cuMemHostAlloc(void **out, size_t count, unsigned flags) {
    (void)flags;
    pinned_bytes = count;
    *out = pinned = malloc(count);
    return depth ? 0 : INVALID_CONTEXT;
}
// Copies without waiting take pinned memory.
static unsigned copy(uint64_t at, char *host, size_t count, int to_host) {
    char *there = behind(at, count);
    if (!depth) return INVALID_CONTEXT;
    if (!there || host != pinned || count > pinned_bytes) return INVALID_VALUE;
    to_host ? memcpy(host, there, count) : memcpy(there, host, count);
    return 0;
}
unsigned cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t count, void *stream) {
    return (void)stream, copy(from, to, count, 1);
}
unsigned cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t count, void *stream) {
    return (void)stream, copy(to, (char *)from, count, 0);
}
unsigned cuStreamWriteValue64_v2(void *stream, uint64_t at, uint64_t value, unsigned flags) {
    char *there = behind(at, 8);
    (void)stream, (void)flags;
    if (!depth || !there || at % 8) return INVALID_VALUE;
    memcpy(there, &value, 8);
    return 0;
}
// Registers of other devices are not ordinary memory: the flag for them is refused.
unsigned cuMemHostRegister_v2(void *at, size_t count, unsigned flags) {
    return (void)at, (void)count, flags & 4 ? INVALID_VALUE : 0;
}
unsigned cuMemGetHandleForAddressRange(int *out, uint64_t at, size_t count, unsigned kind, uint64_t flags) {
    if (kind != 1 || flags || !behind(at, count)) return INVALID_VALUE;
    *out = memfd_create("dmabuf", MFD_CLOEXEC);
    return *out < 0 ? 2 : 0;
}
