/* The traffic on the connections of sockets.c: bytes that go and come, and how connections begin and end. */
#include "sockets.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

bool is_shortage(int os_errno) {
    return os_errno == EMFILE || os_errno == ENFILE || os_errno == ENOBUFS || os_errno == ENOMEM ||
           os_errno == EADDRNOTAVAIL;
}

/* Whether a call on a connection may be made again: the peer is not lost. */
static bool is_passing(int os_errno) {
    return os_errno == EAGAIN || os_errno == EINTR || is_shortage(os_errno);
}

/* === sending === */

void end_command(struct transport *t, struct waiting *w, int32_t status) {
    struct queue *q = &t->queues[w->command.queue];
    if (status == TY_OK && (w->command.flags & TY_FLAG_NOTIFY) == 0) {
        q->used--;
    } else {
        TyEvent *event = &q->events[q->head++ % t->needs.queue_depth];
        event->kind = status == TY_OK ? TY_EVENT_DONE : TY_EVENT_ERROR;
        event->queue = w->command.queue;
        event->peer = w->command.peer;
        event->status = status;
        event->tag = w->command.tag;
    }
    w->next = q->free;
    q->free = w;
}

static struct waiting *take_first(struct peer *p) {
    struct waiting *w = p->first;
    p->first = w->next;
    if (p->first == NULL) p->last = &p->first;
    p->sent = 0;
    return w;
}

void fail_peer(struct transport *t, struct peer *p, int32_t status) {
    if (p->failure == TY_OK) p->failure = status;
    close_fd(&p->out);
    while (p->first != NULL) end_command(t, take_first(p), status);
}

bool send_to(struct transport *t, struct peer *p, size_t *turn) {
    bool moved = false;
    while (p->first != NULL && *turn > 0) {
        struct waiting *w = p->first;
        const TyCommand *c = &w->command;
        bool has_payload = c->op == TY_OP_PUT || c->op == TY_OP_PUT_SIGNAL;
        struct message m = {c->op, c->signal, c->add, c->dst_window, c->dst_offset,
                            has_payload ? c->bytes : 0, c->value};
        size_t skip = p->sent < sizeof m ? p->sent : sizeof m;
        size_t rest = m.bytes - (p->sent - skip);
        struct iovec parts[2];
        struct msghdr header;
        ssize_t sent;
        parts[0].iov_base = (uint8_t *)&m + skip;
        parts[0].iov_len = sizeof m - skip;
        parts[1].iov_base = t->windows[c->src_window].pointer + c->src_offset + (p->sent - skip);
        parts[1].iov_len = rest < *turn ? rest : *turn;
        memset(&header, 0, sizeof header);
        header.msg_iov = parts;
        header.msg_iovlen = m.bytes == 0 ? 1 : 2;
        sent = sendmsg(p->out, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && !is_passing(errno)) {
            fail_peer(t, p, TY_PEER_LOST);
            return moved;
        }
        if (sent > 0) {
            moved = true;
            p->moved = now();
            p->sent += (size_t)sent;
            *turn -= (size_t)sent < *turn ? (size_t)sent : *turn;
        }
        if (p->sent == sizeof m + m.bytes) {
            end_command(t, take_first(p), TY_OK);
        } else if (sent < 0) {
            /* A slow peer takes some bytes now and then; a lost one none until the deadline (INV-6). */
            if (now() - p->moved > t->needs.deadline_ns) fail_peer(t, p, TY_DEADLINE);
            return moved;
        }
    }
    return moved;
}

/* === receiving === */

/* The bytes come from another process. */
static bool is_in_range(const struct transport *t, const struct message *m) {
    bool raises = m->op == TY_OP_PUT_SIGNAL || m->op == TY_OP_SIGNAL;
    uint64_t bytes = m->op == TY_OP_PUT_VALUE ? 8 : m->bytes;
    if (m->op < TY_OP_PUT || m->op > TY_OP_SIGNAL || m->window >= t->needs.windows) return false;
    if (raises && m->signal >= t->needs.signals) return false;
    if (m->op == TY_OP_PUT_VALUE && (m->offset % 8 != 0 || m->bytes != 0)) return false;
    return m->offset <= t->windows[m->window].bytes &&
           bytes <= t->windows[m->window].bytes - m->offset;
}

/* A whole message is there: payload before signal (INV-1), and a value at once (INV-3). */
static void arrive(struct transport *t, const struct message *m) {
    if (m->op == TY_OP_PUT_VALUE)
        __atomic_store_n((uint64_t *)(void *)(t->windows[m->window].pointer + m->offset), m->value,
                         __ATOMIC_RELEASE);
    if (m->op == TY_OP_PUT_SIGNAL || m->op == TY_OP_SIGNAL)
        __atomic_fetch_add(&t->signals[m->signal], (uint64_t)m->add, __ATOMIC_RELEASE);
}

/* The end of a peer's connection is a goodbye. It is a failure of commands that the peer has not taken, and of
 * later ones; the host finds out by itself whether the peer died. */
static void part_from(struct transport *t, struct peer *p) {
    close_fd(&p->in);
    p->has_left = true;
    if (p->first != NULL) fail_peer(t, p, TY_PEER_LOST);
}

/* Takes what a peer has sent, at most for a turn. */
static bool receive_from(struct transport *t, struct peer *p, size_t *turn) {
    bool moved = false;
    while (p->in >= 0 && *turn > 0) {
        struct message *m = &p->message;
        uint8_t *to = (uint8_t *)m + p->got;
        size_t room = sizeof *m - p->got;
        ssize_t got;
        if (p->got >= sizeof *m) {
            to = t->windows[m->window].pointer + m->offset + (p->got - sizeof *m);
            room = m->bytes - (p->got - sizeof *m);
        }
        got = recv(p->in, to, room < *turn ? room : *turn, MSG_DONTWAIT);
        if (got < 0 && is_passing(errno)) break;
        if (got <= 0) {
            part_from(t, p);
            break;
        }
        moved = true;
        *turn -= (size_t)got;
        p->got += (size_t)got;
        if (p->got == sizeof *m && !is_in_range(t, m)) {
            fail_peer(t, p, TY_PROTOCOL);
            close_fd(&p->in);
        } else if (p->got >= sizeof *m && p->got == sizeof *m + m->bytes) {
            arrive(t, m);
            p->got = 0;
        }
    }
    return moved;
}

/* Learns whose connection this is. A stranger is sent away. */
static void greet(struct transport *t, struct joining *j) {
    uint8_t *to = (uint8_t *)&j->hello + j->got;
    ssize_t got = recv(j->fd, to, sizeof j->hello - j->got, MSG_DONTWAIT);
    if (got < 0 && is_passing(errno)) return;
    if (got > 0) j->got += (size_t)got;
    if (got > 0 && j->got < sizeof j->hello) return;
    if (got > 0 && memcmp(j->hello.token, t->token, sizeof t->token) == 0 &&
        j->hello.from < t->count && t->peers[j->hello.from].in < 0) {
        t->peers[j->hello.from].in = j->fd;
        t->joined++;
        j->fd = -1;
    }
    close_fd(&j->fd);
}

void shut_the_door(struct transport *t) {
    uint32_t i;
    close_fd(&t->listener);
    for (i = 0; t->joining != NULL && i < t->count + STRANGERS; i++) close_fd(&t->joining[i].fd);
}

/* A place for one more connection: a free one, or that of the one which has been silent for longest. */
static struct joining *place(struct transport *t) {
    struct joining *oldest = &t->joining[0];
    uint32_t i;
    for (i = 0; i < t->count + STRANGERS && oldest->fd >= 0; i++)
        if (t->joining[i].fd < 0 || t->joining[i].number < oldest->number) oldest = &t->joining[i];
    return oldest;
}

void accept_all(struct transport *t) {
    uint32_t i;
    if (t->joined == t->count) return;
    for (i = 0; i < t->count + STRANGERS; i++)
        if (t->joining[i].fd >= 0) greet(t, &t->joining[i]);
    for (i = 0; i < t->count + STRANGERS && t->joined < t->count; i++) {
        struct joining *j;
        int fd = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC);
        t->shortage = fd < 0 && is_shortage(errno) ? errno : 0;
        if (fd < 0) break;
        j = place(t);
        close_fd(&j->fd);
        j->fd = fd;
        j->got = 0;
        j->number = t->callers++;
        greet(t, j);
    }
    if (t->joined == t->count) shut_the_door(t);
}

/* One turn of each kind for all peers, so that the lock is soon free; another peer is the first each time. */
bool drive(struct transport *t) {
    size_t out = TURN_BYTES, in = TURN_BYTES;
    bool moved = false;
    uint32_t i;
    accept_all(t);
    for (i = 0; i < t->count; i++) {
        struct peer *p = &t->peers[(t->first + i) % t->count];
        if (send_to(t, p, &out)) moved = true;
        if (receive_from(t, p, &in)) moved = true;
    }
    t->first = (t->first + 1) % t->count;
    return moved;
}
