/* What moves on the connections of sockets.c, and how connections begin and end. */
#include "sockets.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Bytes that are read from a peer before others get their turn. */
#define TURN_BYTES ((size_t)1 << 20)

uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
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

/* A peer that cannot be reached: all of its commands end, those of others go on. */
static void fail_peer(struct transport *t, struct peer *p, int32_t status) {
    if (p->failure == TY_OK) p->failure = status;
    close_fd(&p->out);
    while (p->first != NULL) end_command(t, take_first(p), status);
}

void send_to(struct transport *t, struct peer *p) {
    while (p->first != NULL) {
        struct waiting *w = p->first;
        const TyCommand *c = &w->command;
        bool has_payload = c->op == TY_OP_PUT || c->op == TY_OP_PUT_SIGNAL;
        struct message m = {c->op, c->signal, c->add, c->dst_window, c->dst_offset,
                            has_payload ? c->bytes : 0, c->value};
        size_t skip = p->sent < sizeof m ? p->sent : sizeof m;
        struct iovec parts[2];
        struct msghdr header;
        ssize_t sent;
        parts[0].iov_base = (uint8_t *)&m + skip;
        parts[0].iov_len = sizeof m - skip;
        parts[1].iov_base = t->windows[c->src_window].pointer + c->src_offset + (p->sent - skip);
        parts[1].iov_len = m.bytes - (p->sent - skip);
        memset(&header, 0, sizeof header);
        header.msg_iov = parts;
        header.msg_iovlen = m.bytes == 0 ? 1 : 2;
        sent = sendmsg(p->out, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) {
            fail_peer(t, p, TY_PEER_LOST);
            return;
        }
        if (sent > 0) p->sent += (size_t)sent;
        if (p->sent == sizeof m + m.bytes) {
            end_command(t, take_first(p), TY_OK);
        } else if (sent < 0) {
            if (now() > w->until) fail_peer(t, p, TY_DEADLINE); /* INV-6 */
            return;
        }
    }
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

/* Takes what a peer has sent, at most for a turn. An end of the connection is a goodbye: the host finds
 * out by itself whether the peer died. */
static bool receive_from(struct transport *t, struct peer *p) {
    size_t turn = 0;
    while (p->in >= 0 && turn < TURN_BYTES) {
        struct message *m = &p->message;
        uint8_t *to = (uint8_t *)m + p->got;
        size_t room = sizeof *m - p->got;
        ssize_t got;
        if (p->got >= sizeof *m) {
            to = t->windows[m->window].pointer + m->offset + (p->got - sizeof *m);
            room = m->bytes - (p->got - sizeof *m);
        }
        got = recv(p->in, to, room, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (got <= 0) {
            close_fd(&p->in);
            break;
        }
        turn += (size_t)got;
        p->got += (size_t)got;
        if (p->got == sizeof *m && !is_in_range(t, m)) {
            fail_peer(t, p, TY_PROTOCOL);
            close_fd(&p->in);
        } else if (p->got >= sizeof *m && p->got == sizeof *m + m->bytes) {
            arrive(t, m);
            p->got = 0;
        }
    }
    return turn != 0;
}

/* Learns whose connection this is. A stranger is sent away. */
static void greet(struct transport *t, struct joining *j) {
    uint8_t *to = (uint8_t *)&j->hello + j->got;
    ssize_t got = recv(j->fd, to, sizeof j->hello - j->got, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
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

void accept_all(struct transport *t) {
    uint32_t i;
    for (i = 0; i < t->count && t->joined < t->count; i++) {
        struct joining *j = &t->joining[i];
        if (j->fd < 0) {
            j->fd = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC);
            j->got = 0;
            if (j->fd < 0) return;
        }
        greet(t, j);
    }
}

bool drive(struct transport *t) {
    bool moved = false;
    uint32_t i;
    accept_all(t);
    for (i = 0; i < t->count; i++) {
        if (t->peers[i].first != NULL) send_to(t, &t->peers[i]);
        if (receive_from(t, &t->peers[i])) moved = true;
    }
    return moved;
}
