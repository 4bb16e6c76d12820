/* A small JSON reader: one tree, freed as a whole. Depth, size and numbers are bounded; a fault gives a line. */
#ifndef FAKE_NVML_JSON_H
#define FAKE_NVML_JSON_H

#include <stddef.h>
#include <stdint.h>

typedef enum { J_NULL, J_BOOL, J_NUMBER, J_STRING, J_ARRAY, J_OBJECT } JsonType;

typedef struct Json Json;
struct Json {
    JsonType type;
    char *key;          /* inside an object */
    char *text;         /* J_STRING */
    double number;      /* J_NUMBER, J_BOOL */
    uint64_t magnitude; /* J_NUMBER written as an integer: its digits, exact to 64 bits */
    int is_integer;
    int is_negative;
    Json *child; /* first element of an array or object */
    Json *next;
};

/* NULL on a fault: why is filled with "line N: ...". text must end with a zero byte. */
Json *json_parse(const char *text, char *why, size_t why_size);
void json_free(Json *tree);
const Json *json_get(const Json *object, const char *key); /* NULL where absent or not an object */

#endif
