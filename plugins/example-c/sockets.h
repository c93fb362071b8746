/*
 * example_sockets: a tokenyard transport over TCP, in C11: ranks of one machine, which could
 * be of many. shm.c shows a fabric whose commands end at once; this one shows a network: commands wait,
 * buffers fill up, peers are lost, and nothing moves unless a thread drives it.
 *
 * A rank listens on a port of its own, and sends to each peer on one connection, on which commands keep
 * their order (TY_CAP_ORDERED). A command is done when the kernel has all of its bytes, so its source
 * may be overwritten (INV-4). One lock guards the instance: `post` and `poll` take it for work that never
 * waits, and `progress` returns if another thread has it.
 *
 * sockets.c has the slots, sockets_io.c what moves on the connections, and this file what both know.
 */
#ifndef EXAMPLE_SOCKETS_H
#define EXAMPLE_SOCKETS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* accept4, getrandom, besides POSIX */
#endif
#include <pthread.h>
#include <stdbool.h>

#include "tokenyard_plugin.h"

#define ENDPOINT_VERSION 1u
#define MOST_PEERS 256u
/* Bytes that go, and bytes that come, before others get their turn: of peers, and of threads that want the lock. */
#define TURN_BYTES ((size_t)1 << 20)
/* Connections beside those of the peers that may be silent before one of them is sent away. */
#define STRANGERS 64u

/* The endpoint that a rank gives a peer. It travels as bytes: peers check every field. */
struct endpoint {
    uint32_t version;
    uint32_t team, from, to; /* ranks of the team; its owner, and the peer that it is for */
    uint64_t token[2];       /* identifies the instance; a peer shows it when it connects */
    uint64_t bytes[TY_MAX_WINDOWS];
    uint32_t signals;
    uint32_t port;
};

/* The first bytes of a connection. */
struct hello {
    uint64_t token[2]; /* of the instance that is called */
    uint32_t from;
    uint32_t reserved;
};

/* The head of a command, before its payload. */
struct message {
    uint32_t op, signal, add, window;
    uint64_t offset, bytes, value;
};

/* A command that was accepted and has not ended. */
struct waiting {
    TyCommand command;
    struct waiting *next;
};

struct queue {
    struct waiting *slots, *free; /* needs.queue_depth */
    TyEvent *events;              /* a ring of as many */
    uint64_t head, tail;
    uint32_t used; /* commands that have not ended, and events that were not polled */
};

struct peer {
    int out, in; /* connections to it and from it, or -1 */
    struct waiting *first, **last;
    size_t sent; /* bytes of `first`, its message included */
    uint64_t moved; /* when the peer last took something, or `first` was posted while nothing waited: see `now` */
    struct message message;
    size_t got; /* bytes of `message` and its payload that have arrived */
    int32_t world_rank;
    int32_t failure; /* the first status of a command to it; 0 while it is well */
    bool has_left;   /* it has ended its connection, so commands to it fail from now on */
};

struct joining {
    int fd;
    uint64_t number; /* connections are counted as they come */
    size_t got;
    struct hello hello;
};

struct transport {
    TyTransportNeeds needs;
    pthread_mutex_t lock;
    uint32_t me, count, joined;
    uint32_t turn, first; /* the peers that `health` looks at, and that `drive` moves, before others */
    uint64_t callers;     /* connections that were accepted */
    uint64_t token[2];
    int listener;
    int shortage; /* `errno` of the last accept if this process had no descriptor or memory for it, else 0 */
    uint32_t port;
    TyWindow windows[TY_MAX_WINDOWS];
    struct peer *peers;
    struct joining *joining; /* `count + STRANGERS` connections whose hello has not arrived; fd -1: free */
    struct queue *queues;
    uint64_t *signals;
    uint32_t unknown_op; /* the first one; 0: none */
};

/* In nanoseconds. */
uint64_t now(void);
void close_fd(int *fd);
/* Whether a call failed because this process, or the system, has none left: descriptors, ports, buffers, memory. No
 * peer is to blame, and it may be better later. */
bool is_shortage(int os_errno);
/* Ends a command: with an event if the caller asked for one, or if it failed (INV-7). */
void end_command(struct transport *t, struct waiting *w, int32_t status);
/* A peer that cannot be reached: all of its commands end, those of others go on. */
void fail_peer(struct transport *t, struct peer *p, int32_t status);
/* Sends to one peer until its socket is full, or the rest of a turn is over. Returns whether something moved. */
bool send_to(struct transport *t, struct peer *p, size_t *turn);
/* Takes connections of peers until all peers have joined. */
void accept_all(struct transport *t);
/* Takes no more connections. */
void shut_the_door(struct transport *t);
/* Drives everything once, under the lock. Returns whether something moved. */
bool drive(struct transport *t);

#endif
