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
    uint64_t until; /* in nanoseconds, see `now` */
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
    struct message message;
    size_t got; /* bytes of `message` and its payload that have arrived */
    int32_t world_rank;
    int32_t failure; /* the first status of a command to it; 0 while it is well */
};

struct joining {
    int fd;
    size_t got;
    struct hello hello;
};

struct transport {
    TyTransportNeeds needs;
    pthread_mutex_t lock;
    uint32_t me, count, joined, turn;
    uint64_t token[2];
    int listener;
    uint32_t port;
    TyWindow windows[TY_MAX_WINDOWS];
    struct peer *peers;
    struct joining *joining; /* `count` connections whose hello has not arrived; fd -1: free */
    struct queue *queues;
    uint64_t *signals;
    uint32_t unknown_op; /* the first one; 0: none */
};

/* In nanoseconds. */
uint64_t now(void);
void close_fd(int *fd);
/* Ends a command: with an event if the caller asked for one, or if it failed (INV-7). */
void end_command(struct transport *t, struct waiting *w, int32_t status);
/* Sends to one peer until its socket is full. */
void send_to(struct transport *t, struct peer *p);
/* Takes the connections that wait. */
void accept_all(struct transport *t);
/* Drives everything once, under the lock. Returns whether something arrived. */
bool drive(struct transport *t);

#endif
