/*
 * example_c: a complete tokenyard transport over POSIX shared memory, in one file of C11 that is
 * also C++17. Copy it, rename it, and replace the parts that say "A fabric" by your hardware.
 *
 * Window memory: the transport owns it (TY_CAP_OWNS_MEMORY). `alloc` makes a shared memory object
 * with a random name and mode 0600; the endpoint holds the names; `connect` maps the peer's
 * objects. The rank that maps a set of objects last removes their names, so that nothing is left in
 * /dev/shm if ranks are killed later; until then `close` removes them, and a kill leaves them.
 *
 * Threads: see TyTransportTable. Each queue is used by one thread at a time, so queues need no lock.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* getrandom, besides POSIX */
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tokenyard_plugin.h"

#define ENDPOINT_VERSION 2u
#define NAME_BYTES 48
/* Each signal has its own cache line: peers that raise different ones do not collide. */
#define LINE 64u
/* The objects of a rank: its windows by id, then its signal area. */
#define OBJECTS (TY_MAX_WINDOWS + 1)
#define SIGNALS TY_MAX_WINDOWS

/* The first line of a signal area. Signal i is the 64-bit word at the start of line 1 + i. */
struct area {
    uint64_t token[2]; /* identifies the owner of this area; also in the endpoint */
    uint64_t mapped;   /* ranks that have mapped all objects of this rank */
};

/* The endpoint that a rank gives its peers. It travels as bytes: peers check every field. */
struct endpoint {
    uint32_t version;
    uint32_t team; /* number of ranks */
    uint32_t rank; /* its owner, as an index of the team */
    uint32_t reserved;
    uint64_t token[2];
    uint64_t bytes[OBJECTS]; /* of each object, 0 where there is none */
    char name[NAME_BYTES];   /* of the objects, without the suffix; ends with a zero byte */
};

struct object {
    uint8_t *base; /* where it is mapped here, or NULL */
    uint64_t bytes;
    int fd; /* of this rank's own objects, else -1 */
};

/* One rank of the team, as this rank sees it. */
struct peer {
    struct object objects[OBJECTS];
    int32_t world_rank;
};

/* A ring of events that were not polled yet. Queues of different threads share no cache line. */
struct queue {
    uint64_t head, tail;
    uint8_t rest[2 * LINE - 16];
};

struct transport {
    TyTransportNeeds needs;
    uint32_t me, count;
    char name[NAME_BYTES];
    struct peer *peers;   /* peers[me] holds this rank's own objects */
    struct queue *queues;
    TyEvent *events;      /* needs.queue_depth for each queue */
    uint64_t first_error; /* 0 while healthy; see break_health */
};

/* === errors and config === */

/* Fills the caller's error: what was found, what was expected, and the fix after ". Fix: ".
 * The host adds the system's text of `os_errno`, unless it is 0. */
#if defined(__GNUC__)
__attribute__((format(printf, 6, 7)))
#endif
static int32_t fail(TyError *error, int32_t status, const char *operation, int os_errno,
                    int32_t rank, const char *format, ...) {
    va_list list;
    if (error == NULL || error->size < sizeof *error) return status;
    error->os_errno = os_errno;
    error->rank = rank;
    snprintf((char *)error->operation, sizeof error->operation, "%s", operation);
    va_start(list, format);
    vsnprintf((char *)error->message, sizeof error->message, format, list);
    va_end(list);
    return status;
}

/* A host that is older than this file may pass a shorter structure. */
static int32_t check_size(TyError *error, const char *operation, size_t found, size_t wanted) {
    if (found >= wanted) return TY_OK;
    return fail(error, TY_INTERNAL, operation, 0, -1,
                "the host's structure has %zu bytes; expected at least %zu. Fix: use a host and a "
                "plugin of matching versions", found, wanted);
}

/* Reads this component's table. The host has parsed the file: it passes `key = value` lines and
 * comments, each on its line of the operator's file. A component with more keys takes a TOML library. */
static int32_t read_config(const TyConfig *source, bool *load_store, TyError *error) {
    const char *text = (const char *)source->text.data, *file = (const char *)source->file.data;
    const char *end = text + source->text.bytes, *next;
    unsigned line = 1;
    *load_store = true;
    for (; text < end; text = next, line++) {
        char copy[128], key[64] = "", value[64] = "";
        const char *stop = (const char *)memchr(text, '\n', (size_t)(end - text));
        next = stop == NULL ? end : stop + 1;
        snprintf(copy, sizeof copy, "%.*s", (int)(next - text), text);
        copy[strcspn(copy, "#\n")] = 0;
        if (sscanf(copy, " %63[^= \t] = %63s", key, value) < 1) continue;
        if (strcmp(key, "load_store") != 0)
            return fail(error, TY_CONFIG, "read config", 0, -1,
                        "%.*s:%u: unknown key `%s` of example_c; expected load_store",
                        (int)source->file.bytes, file, line, key);
        *load_store = strcmp(value, "true") == 0;
        if (!*load_store && strcmp(value, "false") != 0)
            return fail(error, TY_CONFIG, "read config", 0, -1,
                        "%.*s:%u: load_store is `%s`; expected true or false",
                        (int)source->file.bytes, file, line, value);
    }
    return TY_OK;
}

/* === shared memory objects === */

struct object_name { char text[NAME_BYTES + 8]; };

static struct object_name name_of(const char *base, unsigned which) {
    struct object_name name;
    snprintf(name.text, sizeof name.text, "%s-%u", base, which % 100);
    return name;
}

static int32_t map(struct object *object, int fd, uint64_t bytes, int32_t rank, TyError *error) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return fail(error, TY_SYSTEM, "mmap", errno, rank, "cannot map %llu bytes",
                    (unsigned long long)bytes);
    object->base = (uint8_t *)base;
    object->bytes = bytes;
    return TY_OK;
}

/* Makes one of this rank's objects. Its pages are reserved, so that a full /dev/shm is an error
 * now and not a SIGBUS later. */
static int32_t make_object(struct transport *t, unsigned which, uint64_t bytes, TyError *error) {
    struct object *object = &t->peers[t->me].objects[which];
    struct object_name name = name_of(t->name, which);
    int problem;
    object->fd = shm_open(name.text, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (object->fd < 0)
        return fail(error, TY_SYSTEM, "shm_open", errno, -1, "cannot create %s", name.text);
    do problem = posix_fallocate(object->fd, 0, (off_t)bytes);
    while (problem == EINTR);
    if (problem != 0)
        return fail(error, TY_SYSTEM, "posix_fallocate", problem, -1,
                    "cannot reserve %llu bytes in /dev/shm. Fix: free or enlarge it (mount -o "
                    "remount,size=..., docker run --shm-size)", (unsigned long long)bytes);
    return map(object, object->fd, bytes, -1, error);
}

/* Maps one of a peer's objects, after it has checked the object's owner and length. */
static int32_t open_object(struct peer *p, const struct endpoint *from, unsigned which,
                           TyError *error) {
    struct object_name name = name_of(from->name, which);
    struct stat about;
    int32_t status;
    int fd = shm_open(name.text, O_RDWR, 0);
    memset(&about, 0, sizeof about);
    if (fd < 0 && errno != ENOENT && errno != EACCES)
        return fail(error, TY_SYSTEM, "shm_open", errno, -1,
                    "cannot open %s. Fix: see what this process lacks, such as descriptors (ulimit -n)",
                    name.text);
    if (fd < 0)
        return fail(error, TY_PEER_LOST, "shm_open", errno, p->world_rank,
                    "cannot open the peer's %s: it ended, or sees another /dev/shm. Fix: if both "
                    "live, let them share /dev/shm (docker run --ipc=host)", name.text);
    if (fstat(fd, &about) != 0 || about.st_uid != geteuid() ||
        (uint64_t)about.st_size < from->bytes[which])
        status = fail(error, TY_PROTOCOL, "connect", 0, p->world_rank,
                      "%s has owner %u and %llu bytes; expected owner %u and at least %llu bytes",
                      name.text, (unsigned)about.st_uid, (unsigned long long)about.st_size,
                      (unsigned)geteuid(), (unsigned long long)from->bytes[which]);
    else
        status = map(&p->objects[which], fd, from->bytes[which], p->world_rank, error);
    close(fd);
    return status;
}

/* Only the names are removed: a rank that has mapped the objects still has them. A missing name is
 * not an error. */
static void unlink_names(const char *base) {
    unsigned which;
    for (which = 0; which < OBJECTS; which++) shm_unlink(name_of(base, which).text);
}

static uint64_t signal_offset(uint32_t id) { return ((uint64_t)id + 1) * LINE; }

static struct area *area_of(const struct peer *p) {
    return (struct area *)(void *)p->objects[SIGNALS].base;
}

/* === cold slots: one thread, which may block === */

/* A fabric: open its library with dlopen, look for a device and the right to use it, and return
 * TY_UNAVAILABLE with the fix if one is missing. Leave nothing behind. */
static int32_t example_probe(const TyHost *host, const TyConfig *source,
                             TyCapabilities *capabilities, TyError *error) {
    bool load_store;
    int32_t status = check_size(error, "probe", capabilities->size, sizeof *capabilities);
    (void)host;
    if (status == TY_OK) status = read_config(source, &load_store, error);
    if (status != TY_OK) return status;
    if (access("/dev/shm", R_OK | W_OK | X_OK) != 0)
        return fail(error, TY_UNAVAILABLE, "probe", errno, -1,
                    "/dev/shm cannot be used. Fix: mount -t tmpfs -o mode=1777 tmpfs /dev/shm");
    capabilities->flags =
        TY_CAP_NATIVE_ATOMICS | TY_CAP_GET | TY_CAP_BOUNDED_PUT | TY_CAP_OWNS_MEMORY;
    if (load_store) capabilities->flags |= TY_CAP_LOAD_STORE;
    capabilities->memory_kinds = TY_MEMORY_HOST;
    capabilities->max_peers = 1024;
    capabilities->max_queues = 64;
    capabilities->max_signals = 65536;
    capabilities->max_queue_depth = 4096;
    capabilities->max_windows = TY_MAX_WINDOWS;
    capabilities->largest_put = (uint64_t)1 << 40;
    return TY_OK;
}

/* A fabric: destroy the queues and deregister, so that no peer can write any longer (INV-8). */
static void example_close(void *instance) {
    struct transport *t = (struct transport *)instance;
    uint32_t i, which;
    if (t->name[0] != 0) unlink_names(t->name);
    for (i = 0; t->peers != NULL && i < t->count; i++) {
        for (which = 0; which < OBJECTS; which++) {
            const struct object *object = &t->peers[i].objects[which];
            if (object->base != NULL) munmap(object->base, object->bytes);
            if (object->fd >= 0) close(object->fd);
        }
    }
    free(t->events);
    free(t->queues);
    free(t->peers);
    free(t);
}

/* All memory that the instance will use: hot slots allocate nothing. */
static struct transport *new_transport(const TyTransportOpen *open) {
    struct transport *t = (struct transport *)calloc(1, sizeof *t);
    uint32_t i, which;
    if (t == NULL) return NULL;
    t->needs = open->needs;
    t->me = open->team.me;
    t->count = open->team.count;
    t->peers = (struct peer *)calloc(t->count, sizeof *t->peers);
    t->queues = (struct queue *)calloc(t->needs.queues + 1, sizeof *t->queues);
    t->events = (TyEvent *)calloc((size_t)t->needs.queues * t->needs.queue_depth + 1,
                                  sizeof *t->events);
    if (t->peers == NULL || t->queues == NULL || t->events == NULL) {
        example_close(t);
        return NULL;
    }
    for (i = 0; i < t->count; i++) {
        t->peers[i].world_rank = (int32_t)open->team.world_ranks[i];
        for (which = 0; which < OBJECTS; which++) t->peers[i].objects[which].fd = -1;
    }
    return t;
}

/* A fabric: open the device, make the protection domain, and one queue per queue and peer with
 * room for needs.queue_depth commands. */
static int32_t example_open(const TyHost *host, const TyTransportOpen *open, void **instance,
                            TyError *error) {
    struct transport *t;
    uint64_t random[4];
    bool load_store;
    int32_t status = check_size(error, "open", open->size, sizeof *open);
    (void)host;
    if (status == TY_OK) status = read_config(&open->config, &load_store, error);
    if (status != TY_OK) return status;
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return fail(error, TY_SYSTEM, "getrandom", errno, -1, "no random bytes");
    t = new_transport(open);
    if (t == NULL) return fail(error, TY_SYSTEM, "calloc", ENOMEM, -1, "no memory");
    snprintf(t->name, sizeof t->name, "/tokenyard-%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    status = make_object(t, SIGNALS, signal_offset(t->needs.signals), error);
    if (status != TY_OK) {
        example_close(t);
        return status;
    }
    memcpy(area_of(&t->peers[t->me])->token, &random[2], 16);
    *instance = t;
    return TY_OK;
}

/* A fabric: the kinds it can register, and TY_HANDLE_DMABUF if it needs one to do so. */
static int32_t example_memory_needs(void *instance, TyMemoryNeeds *needs, TyError *error) {
    (void)instance, (void)error;
    needs->kinds = TY_MEMORY_HOST;
    needs->handles = 0;
    needs->alignment = (uint64_t)sysconf(_SC_PAGESIZE);
    return TY_OK;
}

/* A fabric: most leave this slot NULL and register what the kernel set allocates. Only those
 * whose library must allocate (a symmetric heap) declare TY_CAP_OWNS_MEMORY. */
static int32_t example_alloc(void *instance, TyWindow *window, TyError *error) {
    struct transport *t = (struct transport *)instance;
    const struct object *mine = &t->peers[t->me].objects[window->id];
    int32_t status = make_object(t, window->id, window->bytes, error);
    if (status != TY_OK) return status;
    window->kind = TY_MEMORY_HOST;
    window->pointer = mine->base;
    window->fd = mine->fd;
    window->fd_offset = 0;
    window->device = -1;
    return TY_OK;
}

/* A fabric: register the memory region and store its local and remote keys. */
static int32_t example_register(void *instance, const TyWindow *window, TyError *error) {
    struct transport *t = (struct transport *)instance;
    const struct object *mine = &t->peers[t->me].objects[window->id];
    if (window->pointer == mine->base && window->bytes <= mine->bytes) return TY_OK;
    return fail(error, TY_UNSUPPORTED, "register", 0, -1,
                "window %u was not made by `alloc` of example_c; expected its own memory. Fix: use "
                "example_c for one level only", window->id);
}

/* A fabric: device address, queue numbers, and address and remote key of each window. */
static int32_t example_endpoint(void *instance, uint32_t peer, uint8_t *data, size_t capacity,
                                size_t *bytes, TyError *error) {
    struct transport *t = (struct transport *)instance;
    const struct peer *mine = &t->peers[t->me];
    struct endpoint out;
    uint32_t which;
    (void)peer; /* all peers get the same endpoint */
    if (capacity < sizeof out) return check_size(error, "endpoint", capacity, sizeof out);
    memset(&out, 0, sizeof out);
    out.version = ENDPOINT_VERSION;
    out.team = t->count;
    out.rank = t->me;
    memcpy(out.token, area_of(mine)->token, sizeof out.token);
    for (which = 0; which < OBJECTS; which++) out.bytes[which] = mine->objects[which].bytes;
    memcpy(out.name, t->name, sizeof out.name);
    memcpy(data, &out, sizeof out);
    *bytes = sizeof out;
    return TY_OK;
}

/* Checks that this is an endpoint of the same job: it came from another process. */
static int32_t check_endpoint(const struct transport *t, uint32_t peer, const uint8_t *data,
                              size_t bytes, struct endpoint *out, TyError *error) {
    static const char prefix[] = "/tokenyard-";
    const struct object *mine = t->peers[t->me].objects;
    int32_t rank = t->peers[peer].world_rank;
    uint32_t which;
    memset(out, 0, sizeof *out);
    memcpy(out, data, bytes < sizeof *out ? bytes : sizeof *out);
    if (bytes != sizeof *out || out->version != ENDPOINT_VERSION)
        return fail(error, TY_PROTOCOL, "connect", 0, rank,
                    "the endpoint has version %u and %zu bytes; expected version %u and %zu bytes. "
                    "Fix: use one version of this plugin on all ranks",
                    out->version, bytes, ENDPOINT_VERSION, sizeof *out);
    if (out->team != t->count)
        return fail(error, TY_PROTOCOL, "connect", 0, rank,
                    "the peer's team has %u ranks; expected %u", out->team, t->count);
    if (out->rank != peer)
        return fail(error, TY_PROTOCOL, "connect", 0, rank,
                    "the endpoint is of peer %u; expected that of peer %u", out->rank, peer);
    for (which = 0; which < OBJECTS; which++)
        if (out->bytes[which] != mine[which].bytes)
            return fail(error, TY_PROTOCOL, "connect", 0, rank,
                        "%s %u of the peer has %llu bytes; expected %llu",
                        which == SIGNALS ? "signal area" : "window", which,
                        (unsigned long long)out->bytes[which],
                        (unsigned long long)mine[which].bytes);
    if (memchr(out->name, 0, sizeof out->name) == NULL || strchr(out->name + 1, '/') != NULL ||
        strncmp(out->name, prefix, sizeof prefix - 1) != 0)
        return fail(error, TY_PROTOCOL, "connect", 0, rank,
                    "the name in the endpoint is damaged; expected %s and digits", prefix);
    return TY_OK;
}

/* A fabric: connect the queues and wait for the peer's answer, at most needs.deadline_ns (INV-6).
 * This transport need not wait: a rank has made its objects before it sends their names. */
static int32_t example_connect(void *instance, uint32_t peer, const uint8_t *data, size_t bytes,
                               TyError *error) {
    struct transport *t = (struct transport *)instance;
    struct peer *p = &t->peers[peer];
    struct endpoint from;
    uint32_t which;
    int32_t status = check_endpoint(t, peer, data, bytes, &from, error);
    for (which = 0; status == TY_OK && peer != t->me && which < OBJECTS; which++)
        if (from.bytes[which] != 0 && p->objects[which].base == NULL)
            status = open_object(p, &from, which, error);
    if (status != TY_OK) return status;
    if (memcmp(area_of(p)->token, from.token, sizeof from.token) != 0)
        return fail(error, TY_PROTOCOL, "connect", 0, p->world_rank,
                    "%s has another token than the endpoint; expected the same", from.name);
    /* The rank that maps them last removes the names. */
    if (__atomic_add_fetch(&area_of(p)->mapped, 1, __ATOMIC_ACQ_REL) == t->count)
        unlink_names(from.name);
    return TY_OK;
}

/* A fabric without load and store access: leave it NULL, do not declare TY_CAP_LOAD_STORE. */
static int32_t example_peer_address(void *instance, uint32_t window, uint32_t peer,
                                    uint8_t **address, TyError *error) {
    struct transport *t = (struct transport *)instance;
    (void)error; /* the host passes windows and peers that exist */
    *address = t->peers[peer].objects[window].base;
    return TY_OK;
}

/* === hot slots: one thread per queue, no allocation, no lock, no wait === */

/* Stores the first failure for `health` (INV-7). Queues of several threads may fail at once. */
static int32_t break_health(struct transport *t, const TyCommand *c) {
    uint64_t healthy = 0, what = 0x100u | c->op;
    __atomic_compare_exchange_n(&t->first_error, &healthy, what, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return TY_UNSUPPORTED;
}

/* Payload before signal: the release orders the copy before the new total (INV-1). */
static void raise_signal(struct transport *t, const TyCommand *c) {
    uint8_t *line = t->peers[c->peer].objects[SIGNALS].base + signal_offset(c->signal);
    __atomic_fetch_add((uint64_t *)(void *)line, (uint64_t)c->add, __ATOMIC_RELEASE);
}

/* The host promises that windows, offsets, bytes and signals are in range. */
static int32_t execute(struct transport *t, const TyCommand *c) {
    uint8_t *here = t->peers[t->me].objects[c->src_window].base + c->src_offset;
    uint8_t *there = t->peers[c->peer].objects[c->dst_window].base + c->dst_offset;
    switch (c->op) {
    case TY_OP_PUT:
        memcpy(there, here, c->bytes);
        return TY_OK;
    case TY_OP_PUT_SIGNAL:
        memcpy(there, here, c->bytes);
        raise_signal(t, c);
        return TY_OK;
    case TY_OP_PUT_VALUE: /* one store of 8 bytes: no reader sees half of it (INV-3) */
        __atomic_store_n((uint64_t *)(void *)there, c->value, __ATOMIC_RELEASE);
        return TY_OK;
    case TY_OP_SIGNAL:
        raise_signal(t, c);
        return TY_OK;
    case TY_OP_GET:
        memcpy(here, there, c->bytes);
        return TY_OK;
    default:
        return break_health(t, c); /* unknown op: an error, never a guess */
    }
}

/* A fabric: write work requests, ring the doorbell once per batch, and report TY_EVENT_DONE when
 * the completion comes (INV-5). Shared memory is done at once. A command is accepted only if its
 * event has room, so that no event is ever lost: a full ring is back-pressure. */
static int32_t example_post(void *instance, uint32_t queue, const TyCommand *commands, size_t count,
                            size_t *accepted) {
    struct transport *t = (struct transport *)instance;
    struct queue *l = &t->queues[queue];
    uint32_t depth = t->needs.queue_depth;
    size_t i;
    for (i = 0; i < count && l->head - l->tail < depth; i++) {
        const TyCommand *c = &commands[i];
        int32_t status = execute(t, c);
        if (status != TY_OK || (c->flags & TY_FLAG_NOTIFY) != 0) {
            TyEvent *event = &t->events[(size_t)queue * depth + l->head++ % depth];
            event->kind = status == TY_OK ? TY_EVENT_DONE : TY_EVENT_ERROR;
            event->queue = queue;
            event->peer = c->peer;
            event->status = status;
            event->tag = c->tag;
        }
    }
    *accepted = i;
    return TY_OK;
}

/* A fabric: read the completion queue; an error completion is an event, and makes `health` fail. */
static int32_t example_poll(void *instance, uint32_t queue, TyEvent *events, size_t capacity,
                            size_t *count) {
    struct transport *t = (struct transport *)instance;
    struct queue *l = &t->queues[queue];
    uint32_t depth = t->needs.queue_depth;
    size_t n;
    for (n = 0; n < capacity && l->tail < l->head; n++)
        events[n] = t->events[(size_t)queue * depth + l->tail++ % depth];
    *count = n;
    return TY_OK;
}

/* A fabric without remote atomics: the totals that this rank's completion handler counts. */
static uint64_t example_read_signal(void *instance, uint32_t queue, uint32_t id) {
    const struct transport *t = (const struct transport *)instance;
    const uint8_t *line = t->peers[t->me].objects[SIGNALS].base + signal_offset(id);
    (void)queue;
    return __atomic_load_n((const uint64_t *)(const void *)line, __ATOMIC_ACQUIRE);
}

/* Any thread. A fabric: also link and port events. */
static int32_t example_health(void *instance, TyError *error) {
    struct transport *t = (struct transport *)instance;
    uint64_t what = __atomic_load_n(&t->first_error, __ATOMIC_RELAXED);
    if (what == 0) return TY_OK;
    return fail(error, TY_TRANSPORT, "health", 0, -1, /* about no peer: the host made a mistake */
                "a command had the unknown op %u; expected %d to %d", (unsigned)(what & 0xff),
                TY_OP_PUT, TY_OP_GET);
}

/* === the exported table === */

#define TEXT(literal) { (const uint8_t *)(literal), sizeof(literal) - 1 }

/* In the order of TyTransportTable: C++17 has no designated initialisers. */
static const TyTransportTable table = {
    sizeof(TyTransportTable),
    TEXT("example_c"),
    TEXT("0.1.0"),
    TEXT("POSIX shared memory, an example in C: ranks of one machine"),
    example_probe,
    example_open,
    example_close,
    example_memory_needs,
    example_alloc,
    example_register,
    example_endpoint,
    example_connect,
    example_peer_address,
    example_post,
    example_poll,
    example_read_signal,
    example_health,
    NULL, /* progress: shared memory needs none */
    NULL, /* link_name: the component's name is enough */
    NULL, /* device_api: kernels on the CPU need none */
    NULL, /* device_source: likewise */
    NULL, /* commit: a peer is reachable as soon as it is connected */
    NULL, /* serve_ring: the host serves the rings of GPU kernels */
    NULL, /* device_api_of: as device_api, which is not there */
};

static const TyTransportTable *const tables[] = { &table };

const TyTransportExport tokenyard_transport_v1 = {
    { TY_MAGIC, TY_TRANSPORT_MAJOR, TY_TRANSPORT_MINOR, TY_TRANSPORT_LAYOUT,
      sizeof(TyTransportExport) },
    tables,
    sizeof tables / sizeof tables[0],
};
