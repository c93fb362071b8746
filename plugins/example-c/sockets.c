/* The slots and the table of example_sockets: see sockets.h. */
#include "sockets.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int32_t fail(TyError *error, int32_t status, const char *operation, int os_errno, int32_t rank,
                    const char *message) {
    if (error == NULL || error->size < sizeof *error) return status;
    error->os_errno = os_errno;
    error->rank = rank;
    snprintf((char *)error->operation, sizeof error->operation, "%s", operation);
    snprintf((char *)error->message, sizeof error->message, "%s", message);
    return status;
}

/* === cold slots === */

/* Finds the first key of the component's table: this component has none. A component with keys takes a TOML library. */
static bool find_key(const TyConfig *config, char *key, size_t room) {
    const char *at = (const char *)config->text.data, *end = at + config->text.bytes;
    size_t bytes = 0;
    while (at < end && strchr("# \t\r\n", *at) != NULL) {
        if (*at == '#')
            while (at < end && *at != '\n') at++;
        else
            at++;
    }
    while (at < end && bytes + 1 < room && strchr("= \t\r\n", *at) == NULL) key[bytes++] = *at++;
    key[bytes] = 0;
    return bytes > 0;
}

static int32_t sockets_probe(const TyHost *host, const TyConfig *config, TyCapabilities *capabilities,
                             TyError *error) {
    char key[64], message[192];
    (void)host;
    if (capabilities->size < sizeof *capabilities)
        return fail(error, TY_INTERNAL, "probe", 0, -1, "the host's structure is too short");
    if (find_key(config, key, sizeof key)) {
        /* The host adds the file, and the line of what is named in brackets. */
        snprintf(message, sizeof message, "unknown key `%s`; expected none [key: %s]. Fix: remove it", key, key);
        return fail(error, TY_CONFIG, "probe", 0, -1, message);
    }
    capabilities->flags =
        TY_CAP_ORDERED | TY_CAP_BOUNDED_PUT | TY_CAP_MANUAL_PROGRESS | TY_CAP_MASKING;
    capabilities->memory_kinds = TY_MEMORY_HOST;
    capabilities->max_peers = MOST_PEERS;
    capabilities->max_queues = 64;
    capabilities->max_signals = 65536;
    capabilities->max_queue_depth = 4096;
    capabilities->max_windows = TY_MAX_WINDOWS;
    capabilities->largest_put = (uint64_t)1 << 40;
    return TY_OK;
}

/* No peer reaches this rank's memory any more (INV-8). */
static void sockets_close(void *instance) {
    struct transport *t = (struct transport *)instance;
    uint32_t i;
    shut_the_door(t);
    for (i = 0; t->peers != NULL && i < t->count; i++) {
        close_fd(&t->peers[i].out);
        close_fd(&t->peers[i].in);
    }
    for (i = 0; t->queues != NULL && i < t->needs.queues; i++) {
        free(t->queues[i].slots);
        free(t->queues[i].events);
    }
    free(t->signals);
    free(t->queues);
    free(t->joining);
    free(t->peers);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

static bool make_queue(struct queue *q, uint32_t depth) {
    uint32_t i;
    q->slots = (struct waiting *)calloc(depth, sizeof *q->slots);
    q->events = (TyEvent *)calloc(depth, sizeof *q->events);
    for (i = 0; q->slots != NULL && i < depth; i++) {
        q->slots[i].next = q->free;
        q->free = &q->slots[i];
    }
    return q->slots != NULL && q->events != NULL;
}

/* All memory that the instance will use: hot slots allocate nothing. */
static struct transport *new_transport(const TyTransportOpen *open) {
    struct transport *t = (struct transport *)calloc(1, sizeof *t);
    bool whole;
    uint32_t i;
    if (t == NULL) return NULL;
    pthread_mutex_init(&t->lock, NULL);
    t->listener = -1;
    t->needs = open->needs;
    t->me = open->team.me;
    t->count = open->team.count;
    t->joining = (struct joining *)calloc(t->count + STRANGERS, sizeof *t->joining);
    t->peers = (struct peer *)calloc(t->count, sizeof *t->peers);
    t->queues = (struct queue *)calloc(t->needs.queues + 1, sizeof *t->queues);
    t->signals = (uint64_t *)calloc(t->needs.signals + 1, sizeof *t->signals);
    whole = t->joining != NULL && t->peers != NULL && t->queues != NULL && t->signals != NULL;
    for (i = 0; whole && i < t->needs.queues; i++)
        whole = make_queue(&t->queues[i], t->needs.queue_depth);
    for (i = 0; t->joining != NULL && i < t->count + STRANGERS; i++) t->joining[i].fd = -1;
    for (i = 0; t->peers != NULL && i < t->count; i++) {
        struct peer *p = &t->peers[i];
        p->out = p->in = -1;
        p->last = &p->first;
        p->world_rank = (int32_t)open->team.world_ranks[i];
    }
    if (whole) return t;
    sockets_close(t);
    return NULL;
}

static int32_t sockets_open(const TyHost *host, const TyTransportOpen *open, void **instance,
                            TyError *error) {
    struct sockaddr_in address = {0};
    socklen_t bytes = sizeof address;
    struct transport *t = new_transport(open);
    (void)host;
    if (t == NULL) return fail(error, TY_SYSTEM, "open", ENOMEM, -1, "no memory");
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    t->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (t->listener < 0 || bind(t->listener, (struct sockaddr *)&address, bytes) != 0 ||
        listen(t->listener, (int)t->count + 8) != 0 ||
        getsockname(t->listener, (struct sockaddr *)&address, &bytes) != 0 ||
        getrandom(t->token, sizeof t->token, 0) != (ssize_t)sizeof t->token) {
        int32_t status = fail(error, TY_SYSTEM, "open", errno, -1, "cannot listen on 127.0.0.1");
        sockets_close(t);
        return status;
    }
    t->port = ntohs(address.sin_port);
    *instance = t;
    return TY_OK;
}

static int32_t sockets_memory_needs(void *instance, TyMemoryNeeds *needs, TyError *error) {
    (void)instance, (void)error;
    needs->kinds = TY_MEMORY_HOST;
    needs->handles = 0;
    needs->alignment = 64;
    return TY_OK;
}

static int32_t sockets_register(void *instance, const TyWindow *window, TyError *error) {
    (void)error;
    ((struct transport *)instance)->windows[window->id] = *window;
    return TY_OK;
}

static int32_t sockets_endpoint(void *instance, uint32_t peer, uint8_t *data, size_t capacity,
                                size_t *bytes, TyError *error) {
    const struct transport *t = (const struct transport *)instance;
    struct endpoint out;
    uint32_t i;
    if (capacity < sizeof out)
        return fail(error, TY_INTERNAL, "endpoint", 0, -1, "the host's buffer is too short");
    memset(&out, 0, sizeof out);
    out.version = ENDPOINT_VERSION;
    out.team = t->count;
    out.from = t->me;
    out.to = peer;
    memcpy(out.token, t->token, sizeof out.token);
    for (i = 0; i < t->needs.windows; i++) out.bytes[i] = t->windows[i].bytes;
    out.signals = t->needs.signals;
    out.port = t->port;
    memcpy(data, &out, sizeof out);
    *bytes = sizeof out;
    return TY_OK;
}

/* The mistake of an endpoint, or NULL. */
static const char *problem_of(const struct transport *t, uint32_t peer, const struct endpoint *from) {
    uint32_t i;
    if (from->version != ENDPOINT_VERSION) return "the endpoint has another version";
    if (from->team != t->count) return "the peer's team has another size";
    if (from->from != peer) return "the endpoint is of another peer";
    if (from->to != t->me) return "the endpoint is for another rank";
    if (peer == t->me && memcmp(from->token, t->token, sizeof t->token) != 0)
        return "the endpoint is of another instance";
    for (i = 0; i < TY_MAX_WINDOWS; i++)
        if (from->bytes[i] != t->windows[i].bytes) return "a window of the peer has another size";
    if (from->signals != t->needs.signals) return "the peer has another number of signals";
    return from->port == 0 || from->port > 65535 ? "the endpoint has no port" : NULL;
}

/* The longest wait, rounded up: a limit of zero would be none. */
static struct timeval limit_of(const struct transport *t) {
    uint64_t micros = t->needs.deadline_ns / 1000u + 1u;
    struct timeval limit = {(time_t)(micros / 1000000u), (suseconds_t)(micros % 1000000u)};
    return limit;
}

static int32_t not_connected(struct peer *p, int os_errno, TyError *error) {
    close_fd(&p->out);
    if (is_shortage(os_errno))
        return fail(error, TY_SYSTEM, "connect", os_errno, -1,
                    "no socket for a peer. Fix: raise the limit on open files (ulimit -n)");
    return fail(error, TY_PEER_LOST, "connect", os_errno, p->world_rank,
                "the peer cannot be reached. Fix: see whether it still runs");
}

/* The peer need not answer: its kernel takes the connection, and it learns whose that is when it
 * drives. */
static int32_t sockets_connect(void *instance, uint32_t peer, const uint8_t *data, size_t bytes,
                               TyError *error) {
    struct transport *t = (struct transport *)instance;
    struct peer *p = &t->peers[peer];
    struct timeval limit = limit_of(t);
    struct sockaddr_in address = {0};
    struct endpoint from;
    struct hello hello = {{0, 0}, t->me, 0};
    int at_once = 1; /* a short command does not wait for the answer to the one before */
    const char *problem = "the endpoint has another length";
    if (bytes == sizeof from) {
        memcpy(&from, data, sizeof from);
        problem = problem_of(t, peer, &from);
    }
    if (problem != NULL) return fail(error, TY_PROTOCOL, "connect", 0, p->world_rank, problem);
    memcpy(hello.token, from.token, sizeof hello.token);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)from.port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    p->out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (p->out >= 0) {
        setsockopt(p->out, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        setsockopt(p->out, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
    }
    if (p->out < 0 || connect(p->out, (struct sockaddr *)&address, sizeof address) != 0 ||
        send(p->out, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello)
        return not_connected(p, errno, error);
    return TY_OK;
}

/* Waits until every peer has connected to this rank, so that a rank which never does is found here. */
static int32_t sockets_commit(void *instance, TyError *error) {
    static const struct timespec nap = {0, 100000};
    struct transport *t = (struct transport *)instance;
    uint64_t until = now() + t->needs.deadline_ns;
    uint32_t missing;
    int shortage;
    for (;;) {
        pthread_mutex_lock(&t->lock);
        accept_all(t);
        for (missing = 0; missing < t->count && t->peers[missing].in >= 0;) missing++;
        shortage = t->shortage;
        pthread_mutex_unlock(&t->lock);
        if (missing == t->count) return TY_OK;
        if (now() > until) break;
        nanosleep(&nap, NULL);
    }
    if (shortage != 0)
        return fail(error, TY_SYSTEM, "commit", shortage, -1,
                    "a peer's connection was not accepted. Fix: raise the limit on open files (ulimit -n)");
    return fail(error, TY_DEADLINE, "commit", 0, t->peers[missing].world_rank,
                "the peer has not connected in time. Fix: see whether it still runs");
}

/* === hot slots === */

static int32_t sockets_post(void *instance, uint32_t queue, const TyCommand *commands, size_t count,
                            size_t *accepted) {
    struct transport *t = (struct transport *)instance;
    struct queue *q = &t->queues[queue];
    size_t turn = TURN_BYTES, i;
    pthread_mutex_lock(&t->lock);
    for (i = 0; i < count && q->used < t->needs.queue_depth; i++) {
        struct waiting *w = q->free;
        struct peer *p = &t->peers[commands[i].peer];
        q->free = w->next;
        q->used++;
        w->command = commands[i];
        w->command.queue = queue;
        w->next = NULL;
        if (w->command.op < TY_OP_PUT || w->command.op > TY_OP_SIGNAL) {
            if (t->unknown_op == 0) t->unknown_op = 0x100u | w->command.op;
            end_command(t, w, TY_UNSUPPORTED); /* an error, never a guess */
        } else if (p->failure != TY_OK || p->has_left) {
            fail_peer(t, p, TY_PEER_LOST);
            end_command(t, w, p->failure);
        } else {
            if (p->first == NULL) p->moved = now();
            *p->last = w;
            p->last = &w->next;
            if (p->first == w) send_to(t, p, &turn);
        }
    }
    pthread_mutex_unlock(&t->lock);
    *accepted = i;
    return TY_OK;
}

static int32_t sockets_poll(void *instance, uint32_t queue, TyEvent *events, size_t capacity,
                            size_t *count) {
    struct transport *t = (struct transport *)instance;
    struct queue *q = &t->queues[queue];
    size_t n;
    pthread_mutex_lock(&t->lock);
    drive(t);
    for (n = 0; n < capacity && q->tail < q->head; n++, q->used--)
        events[n] = q->events[q->tail++ % t->needs.queue_depth];
    pthread_mutex_unlock(&t->lock);
    *count = n;
    return TY_OK;
}

static uint64_t sockets_read_signal(void *instance, uint32_t queue, uint32_t id) {
    (void)queue;
    return __atomic_load_n(&((const struct transport *)instance)->signals[id], __ATOMIC_ACQUIRE);
}

/* The first failure that is about no peer; else those of all peers in turn, so that none hides another. */
static int32_t sockets_health(void *instance, TyError *error) {
    struct transport *t = (struct transport *)instance;
    int32_t status = TY_OK, rank = -1;
    uint32_t i, unknown;
    pthread_mutex_lock(&t->lock);
    unknown = t->unknown_op;
    for (i = 0; unknown == 0 && status == TY_OK && i < t->count; i++) {
        const struct peer *p = &t->peers[(t->turn + i) % t->count];
        status = p->failure;
        rank = p->world_rank;
    }
    if (status != TY_OK) t->turn = (t->turn + i) % t->count;
    pthread_mutex_unlock(&t->lock);
    if (unknown != 0) return fail(error, TY_UNSUPPORTED, "health", 0, -1, "a command had an unknown op");
    if (status == TY_OK) return TY_OK;
    return fail(error, status, "health", 0, rank, "a command to the peer has failed");
}

static int32_t sockets_progress(void *instance) {
    struct transport *t = (struct transport *)instance;
    bool moved;
    if (pthread_mutex_trylock(&t->lock) != 0) return TY_OK;
    moved = drive(t);
    pthread_mutex_unlock(&t->lock);
    return moved ? 1 : TY_OK;
}

static int32_t sockets_link_name(void *instance, uint32_t peer, uint8_t *data, size_t capacity,
                                 size_t *bytes) {
    char text[64];
    struct transport *t = (struct transport *)instance;
    int length = snprintf(text, sizeof text, "tcp 127.0.0.1:%u to rank %d", t->port,
                          t->peers[peer].world_rank);
    *bytes = (size_t)length < capacity ? (size_t)length : capacity;
    memcpy(data, text, *bytes);
    return TY_OK;
}

#define TEXT(literal) { (const uint8_t *)(literal), sizeof(literal) - 1 }

static const TyTransportTable table = {
    .size = sizeof(TyTransportTable),
    .name = TEXT("example_sockets"),
    .version = TEXT("0.1.0"),
    .about = TEXT("TCP, an example in C: ranks of one machine"),
    .probe = sockets_probe,
    .open = sockets_open,
    .close = sockets_close,
    .memory_needs = sockets_memory_needs,
    .register_ = sockets_register,
    .endpoint = sockets_endpoint,
    .connect = sockets_connect,
    .post = sockets_post,
    .poll = sockets_poll,
    .read_signal = sockets_read_signal,
    .health = sockets_health,
    .progress = sockets_progress,
    .link_name = sockets_link_name,
    .commit = sockets_commit,
};

static const TyTransportTable *const tables[] = { &table };

const TyTransportExport tokenyard_transport_v1 = {
    { TY_MAGIC, TY_TRANSPORT_MAJOR, TY_TRANSPORT_MINOR, TY_TRANSPORT_LAYOUT,
      sizeof(TyTransportExport) },
    tables,
    sizeof tables / sizeof tables[0],
};
