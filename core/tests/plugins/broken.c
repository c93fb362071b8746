/* A transport plugin that is wrong in one way: every wrong value comes from a -D switch. */
#include "tokenyard_plugin.h"

/* A switch may leave anything unused. */
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-const-variable"

#ifdef NOT_A_PLUGIN
int answer(void) { return 42; }
#else

#ifndef MAGIC
#define MAGIC TY_MAGIC
#endif
#ifndef MAJOR
#define MAJOR TY_TRANSPORT_MAJOR
#endif
#ifndef MINOR
#define MINOR TY_TRANSPORT_MINOR
#endif
#ifndef LAYOUT
#define LAYOUT TY_TRANSPORT_LAYOUT
#endif
#ifndef EXPORT_SIZE
#define EXPORT_SIZE sizeof(TyTransportExport)
#endif
#ifndef TABLE_SIZE
#define TABLE_SIZE sizeof(TyTransportTable)
#endif
#ifndef COMPONENTS
#define COMPONENTS tables
#endif
#ifndef TABLE
#define TABLE &table
#endif
#ifndef COUNT
#define COUNT 1
#endif
#ifndef NAME
#define NAME "broken"
#endif
#ifndef ALLOC
#define ALLOC NULL
#endif
#ifndef POLL
#define POLL poll
#endif
#ifndef FLAGS
#define FLAGS 0
#endif
#ifndef ALIGNMENT
#define ALIGNMENT 4096
#endif

#ifdef NEEDS
int NEEDS(void); /* of another library */
#endif

static int32_t say(TyError *error, int32_t status, int os_errno, const char *message) {
    size_t i;
    for (i = 0; message[i] != 0; i++) error->message[i] = (uint8_t)message[i];
    error->os_errno = os_errno;
    return status;
}

static int32_t probe(const TyHost *host, const TyConfig *config, TyCapabilities *capabilities,
                     TyError *error) {
#ifdef NEEDS
    (void)say(error, 0, NEEDS(), "");
#endif
#ifdef NO_DEVICE
    return say(error, TY_UNAVAILABLE, 0, "found 0 devices, expected 1. Fix: plug one in");
#else
    capabilities->flags = FLAGS;
    return TY_OK;
#endif
}

static int32_t open_(const TyHost *host, const TyTransportOpen *open, void **instance,
                     TyError *error) {
    static int object;
#ifdef OPEN_REFUSED
    return say(error, TY_SYSTEM, 13, "cannot open /dev/broken0. Fix: join the group broken");
#else
    *instance = &object;
    return TY_OK;
#endif
}

static void close_(void *instance) { (void)instance; }

static int32_t memory_needs(void *instance, TyMemoryNeeds *needs, TyError *error) {
    needs->kinds = TY_MEMORY_HOST;
    needs->alignment = ALIGNMENT;
    return TY_OK;
}

static int32_t register_(void *instance, const TyWindow *window, TyError *error) {
    return -1234; /* a status that this host does not know, without a text */
}

/* Says it wrote more than there is room for. */
static int32_t endpoint(void *instance, uint32_t peer, uint8_t *data, size_t capacity,
                        size_t *bytes, TyError *error) {
    *bytes = capacity + 1;
    return TY_OK;
}

/* Fills the text to the last byte, without a zero byte, and ends it in half a character. */
static int32_t connect(void *instance, uint32_t peer, const uint8_t *data, size_t bytes,
                       TyError *error) {
    size_t i;
    for (i = 0; i < sizeof error->message; i++) error->message[i] = 'x';
    error->message[i - 1] = 0xc3;
    error->rank = 5;
    return TY_PEER_LOST;
}

static int32_t post(void *instance, uint32_t queue, const TyCommand *commands, size_t count,
                    size_t *accepted) {
    *accepted = count;
    return TY_OK;
}

static int32_t poll(void *instance, uint32_t queue, TyEvent *events, size_t capacity,
                    size_t *count) {
    *count = 0;
    return TY_OK;
}

static uint64_t read_signal(void *instance, uint32_t queue, uint32_t id) {
    return id;
}

static int32_t health(void *instance, TyError *error) {
    return TY_OK;
}

#define TEXT(literal) { (const uint8_t *)(literal), sizeof(literal) - 1 }

static const TyTransportTable table = {
    TABLE_SIZE, TEXT(NAME), TEXT("1"), TEXT("a plugin for tests"), probe, open_, close_,
    memory_needs, ALLOC, register_, endpoint, connect, NULL, post, POLL, read_signal, health,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL,
};

static const TyTransportTable *const tables[] = { TABLE };

const TyTransportExport tokenyard_transport_v1 = {
    { MAGIC, MAJOR, MINOR, LAYOUT, EXPORT_SIZE }, COMPONENTS, COUNT,
};
#endif
