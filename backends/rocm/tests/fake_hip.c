// HIP's functions over host memory, for tests of the driver's code on machines without a GPU. Two devices:
// 0 shares physical memory by descriptors, 1 cannot and has hipIpc. Nothing here behaves like an AMD GPU.
// Functions that are not defined here are added by the test, and return hipErrorNotSupported.
// With FAKE_WITHOUT_RANGE_HANDLES it lacks what HIP has from version 7 on.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, NOT_SUPPORTED = 801, UNIT = 4096 };

static __thread int device;
static __thread unsigned last;

static unsigned fail(unsigned status) { return last = status; }

unsigned hipInit(unsigned flags) { return flags; }
unsigned hipRuntimeGetVersion(int* version) { *version = 71460850; return 0; }
unsigned hipGetDeviceCount(int* count) { *count = 2; return 0; }
unsigned hipGetDevice(int* out) { *out = device; return 0; }
unsigned hipSetDevice(int to) {
  if (to < 0 || to > 1) return fail(101);
  device = to;
  return 0;
}
unsigned hipDeviceGet(int* out, int ordinal) { *out = ordinal; return 0; }
unsigned hipDeviceCanAccessPeer(int* can, int a, int b) { *can = a != b; return 0; }
unsigned hipDeviceGetP2PAttribute(int* value, unsigned which, int a, int b) {
  // Only one way, so that both answers are seen.
  *value = which == 2 && a < b;
  return 0;
}
unsigned hipDeviceGetAttribute(int* value, unsigned which, int of) {
  (void)of;
  switch (which) {
    case 63: *value = 304; return 0;
    case 74: *value = 65536; return 0;
    case 87: *value = 64; return 0;
    case 89: *value = 1; return 0;
  }
  return fail(INVALID_VALUE);
}
unsigned hipGetDevicePropertiesR0600(char* properties, int of) {
  strcpy(properties + 1160, of == 0 ? "gfx942:sramecc+:xnack-" : "gfx950");
  return 0;
}
const char* hipGetErrorName(unsigned status) {
  return status == 2 ? "hipErrorOutOfMemory" : status == NOT_SUPPORTED ? "hipErrorNotSupported" : "hipErrorOther";
}
const char* hipGetErrorString(unsigned status) { return status == 2 ? "out of memory" : "some text"; }
unsigned hipGetLastError(void) {
  unsigned was = last;
  last = 0;
  return was;
}
// For the test: the last error, without taking it.
unsigned fake_last_error(void) { return last; }

// Allocations have their size in front of them.
unsigned hipMalloc(void** out, size_t bytes) {
  if (bytes > 1u << 30) return fail(2);
  size_t* at = calloc(1, bytes + 64);
  *at = bytes;
  *out = (char*)at + 64;
  return 0;
}
unsigned hipFree(void* at) { free((char*)at - 64); return 0; }

// --- Physical memory: a descriptor.

struct Memory { int fd; size_t bytes; };
struct Properties { unsigned kind, handle_kind, location_kind; int of; };

static void* memory(int fd, size_t bytes) {
  struct Memory* m = malloc(sizeof *m);
  m->fd = fd, m->bytes = bytes;
  return m;
}
unsigned hipMemGetAllocationGranularity(size_t* unit, const struct Properties* p, unsigned option) {
  (void)option;
  if (p->kind != 0x40000000 || p->handle_kind != 1) return fail(INVALID_VALUE);
  *unit = UNIT;
  return 0;
}
unsigned hipMemCreate(void** out, size_t bytes, const struct Properties* p, uint64_t flags) {
  if (p->of == 1) return fail(NOT_SUPPORTED);
  if (flags || bytes % UNIT) return fail(INVALID_VALUE);
  int fd = memfd_create("fake", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)bytes)) return fail(2);
  *out = memory(fd, bytes);
  return 0;
}
unsigned hipMemRelease(struct Memory* m) { close(m->fd); free(m); return 0; }
unsigned hipMemExportToShareableHandle(int* fd, struct Memory* m, unsigned kind, uint64_t flags) {
  (void)kind, (void)flags;
  *fd = dup(m->fd);
  return 0;
}
unsigned hipMemImportFromShareableHandle(void** out, void* fd, unsigned kind) {
  struct stat found;
  if (kind != 1 || fstat((int)(intptr_t)fd, &found)) return fail(INVALID_VALUE);
  *out = memory(dup((int)(intptr_t)fd), (size_t)found.st_size);
  return 0;
}
unsigned hipMemAddressReserve(void** out, size_t bytes, size_t align, void* at, uint64_t flags) {
  (void)align, (void)at, (void)flags;
  *out = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return *out == MAP_FAILED ? fail(2) : 0;
}
unsigned hipMemAddressFree(void* at, size_t bytes) { return munmap(at, bytes) ? fail(INVALID_VALUE) : 0; }

// Ranges with the memory behind them, for handles of ranges.
static struct Mapping { void* at; size_t bytes; int fd; } mappings[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Exchanges one mapping for another, under the lock. 0 if it was there.
static int exchange(void* at, struct Mapping to) {
  int result = -1;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 64 && result; i++)
    if (mappings[i].at == at) mappings[i] = to, result = 0;
  pthread_mutex_unlock(&lock);
  return result;
}
unsigned hipMemMap(void* at, size_t bytes, size_t offset, struct Memory* m, uint64_t flags) {
  (void)flags;
  if (offset || bytes > m->bytes) return fail(INVALID_VALUE);
  void* found = mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, m->fd, 0);
  if (found != at || exchange(0, (struct Mapping){at, bytes, m->fd})) return fail(INVALID_VALUE);
  return 0;
}
#ifndef FAKE_WITHOUT_RANGE_HANDLES
// The descriptor is one of the mapped file: what one writes, the other reads.
unsigned hipMemGetHandleForAddressRange(int* fd, void* at, size_t bytes, unsigned kind, uint64_t flags) {
  if (kind != 1 || flags) return fail(INVALID_VALUE);
  int found = -1;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 64; i++)
    if (at && mappings[i].at == at && bytes <= mappings[i].bytes) found = fcntl(mappings[i].fd, F_DUPFD_CLOEXEC, 0);
  pthread_mutex_unlock(&lock);
  if (found < 0) return fail(INVALID_VALUE);
  *fd = found;
  return 0;
}
#endif
unsigned hipMemSetAccess(void* at, size_t bytes, const unsigned* access, size_t count) {
  // Type and device of the place, then the rights.
  if (count != 1 || access[0] != 1 || access[2] != 3) return fail(INVALID_VALUE);
  return mprotect(at, bytes, PROT_READ | PROT_WRITE) ? fail(INVALID_VALUE) : 0;
}
unsigned hipMemUnmap(void* at, size_t bytes) {
  if (exchange(at, (struct Mapping){0})) return fail(INVALID_VALUE);
  void* found = mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return found == at ? 0 : fail(INVALID_VALUE);
}

// --- A module: its constant, and nothing else.

static const unsigned wave = 64;
unsigned hipModuleGetGlobal(const void** at, size_t* bytes, void* module, const char* name) {
  (void)module;
  if (strcmp(name, "ty_wave")) return fail(500);
  *at = &wave;
  *bytes = sizeof wave;
  return 0;
}

// --- Allocations that hipIpc names: here by their address.

unsigned hipExtMallocWithFlags(void** out, size_t bytes, unsigned flags) {
  return flags == 3 ? hipMalloc(out, bytes) : fail(INVALID_VALUE);
}
struct Handle { void* at; char rest[56]; };
unsigned hipIpcGetMemHandle(struct Handle* handle, void* at) {
  memset(handle, 0, sizeof *handle);
  handle->at = at;
  return 0;
}
unsigned hipIpcOpenMemHandle(void** out, struct Handle handle, unsigned flags) {
  if (flags != 1 || !handle.at) return fail(INVALID_VALUE);
  *out = handle.at;
  return 0;
}
unsigned hipIpcCloseMemHandle(void* at) { return at ? 0 : fail(INVALID_VALUE); }
unsigned hipMemGetAddressRange(void** base, size_t* bytes, void* at) {
  *base = at;
  *bytes = *(size_t*)((char*)at - 64);
  return 0;
}
