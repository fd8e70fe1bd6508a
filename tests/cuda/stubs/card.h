// What the libraries of the pretended card share. runtime.c holds the state: one process, up to 64 cards.
#pragma once
#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))
#define MANY_CARDS 64
#define PAGE ((size_t)2 << 20) // what the driver hands out at least

enum owner { UNKNOWN, ON_CARD, PINNED, REGISTERED };

// Memory of a card: taken by contexts, communicators and the allocator. take_memory: 0 if the card is full.
PUBLIC int take_memory(size_t bytes, int device);
PUBLIC void give_memory(size_t bytes, int device);

// Ranges of addresses and whose they are.
PUBLIC void add_range(void *at, size_t bytes, enum owner owner, int device);
PUBLIC size_t remove_range(void *at, int *device);
PUBLIC enum owner owner_of(const void *at, int *device);

PUBLIC int current_card(void);
PUBLIC int has_context(int device);

// A line of the file FAKE_LOG, after the process's rank and number and the thread's.
PUBLIC void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

// A number of the environment.
PUBLIC long setting(const char *name, long otherwise);
