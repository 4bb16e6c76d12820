#include "json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_LIMIT 32

typedef struct {
    const char *start, *at;
    char *why;
    size_t why_size;
} Parser;

static Json *fail(Parser *p, const char *what) {
    int line = 1;
    for (const char *c = p->start; c < p->at; c++) line += *c == '\n';
    if (p->why[0] == 0) snprintf(p->why, p->why_size, "line %d: %s", line, what);
    return NULL;
}

static void skip_space(Parser *p) { p->at += strspn(p->at, " \t\r\n"); }

static Json *make(JsonType type) {
    Json *node = calloc(1, sizeof *node);
    if (node != NULL) node->type = type;
    return node;
}

void json_free(Json *tree) {
    while (tree != NULL) {
        Json *next = tree->next;
        json_free(tree->child);
        free(tree->key);
        free(tree->text);
        free(tree);
        tree = next;
    }
}

const Json *json_get(const Json *object, const char *key) {
    if (object == NULL || object->type != J_OBJECT) return NULL;
    for (const Json *item = object->child; item != NULL; item = item->next)
        if (strcmp(item->key, key) == 0) return item;
    return NULL;
}

/* The characters of \uXXXX as UTF-8; surrogates are not joined, names of GPUs need none. */
static size_t put_utf8(char *out, unsigned code) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    out[0] = (char)(0xE0 | code >> 12);
    out[1] = (char)(0x80 | (code >> 6 & 0x3F));
    out[2] = (char)(0x80 | (code & 0x3F));
    return 3;
}

static int read_escape(Parser *p, char *out, size_t *length) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char kind = *p->at++;
    const char *found = kind ? strchr(from, kind) : NULL;
    if (found != NULL) {
        out[(*length)++] = to[found - from];
        return 1;
    }
    if (kind != 'u' || strspn(p->at, "0123456789abcdefABCDEF") < 4) return 0;
    char digits[5] = {p->at[0], p->at[1], p->at[2], p->at[3], 0};
    p->at += 4;
    *length += put_utf8(out + *length, (unsigned)strtoul(digits, NULL, 16));
    return 1;
}

static char *read_text(Parser *p) {
    if (*p->at != '"') return (char *)fail(p, "a string was expected");
    p->at++;
    char *out = malloc(strlen(p->at) + 1); /* an escape is never shorter than what it stands for */
    if (out == NULL) return (char *)fail(p, "out of memory");
    size_t length = 0;
    while (*p->at != 0 && *p->at != '"') {
        if ((unsigned char)*p->at < 0x20) break;
        if (*p->at != '\\') {
            out[length++] = *p->at++;
            continue;
        }
        p->at++;
        if (!read_escape(p, out, &length)) break;
    }
    if (*p->at != '"') {
        free(out);
        return (char *)fail(p, "a string does not end, or holds a bad escape");
    }
    p->at++;
    out[length] = 0;
    char *fitted = realloc(out, length + 1);
    return fitted != NULL ? fitted : out;
}

static Json *read_number(Parser *p) {
    char *end;
    size_t span = strspn(p->at, "+-0123456789.eE");
    double number = strtod(p->at, &end);
    if (span == 0 || end != p->at + span || !isfinite(number)) return fail(p, "not a number");
    Json *node = make(J_NUMBER);
    if (node == NULL) return fail(p, "out of memory");
    node->number = number;
    node->is_negative = *p->at == '-';
    const char *digits = p->at + node->is_negative;
    if (strspn(digits, "0123456789") == span - (size_t)node->is_negative) {
        errno = 0;
        node->magnitude = strtoull(digits, NULL, 10);
        node->is_integer = errno == 0;
    }
    p->at += span;
    return node;
}

static Json *read_value(Parser *p, int depth);

static Json *read_items(Parser *p, int depth, JsonType type, char close) {
    Json *node = make(type);
    if (node == NULL) return fail(p, "out of memory");
    Json **slot = &node->child;
    p->at++;
    skip_space(p);
    while (*p->at != close) {
        char *key = NULL;
        if (type == J_OBJECT) {
            key = read_text(p);
            skip_space(p);
            if (key != NULL && *p->at != ':') fail(p, "':' was expected");
            if (key == NULL || *p->at != ':') goto bad;
            p->at++;
        }
        *slot = read_value(p, depth + 1);
        if (*slot == NULL) {
        bad:
            free(key);
            json_free(node);
            return NULL;
        }
        (*slot)->key = key;
        slot = &(*slot)->next;
        skip_space(p);
        if (*p->at == ',') {
            p->at++;
            skip_space(p);
            if (*p->at != close) continue;
        }
        if (*p->at == close && p->at[-1] != ',') break;
        fail(p, "',' or the end of a list was expected");
        json_free(node);
        return NULL;
    }
    p->at++;
    return node;
}

static Json *read_word(Parser *p, const char *word, JsonType type, double number) {
    if (strncmp(p->at, word, strlen(word)) != 0) return fail(p, "not a value");
    Json *node = make(type);
    if (node == NULL) return fail(p, "out of memory");
    p->at += strlen(word);
    node->number = number;
    return node;
}

static Json *read_value(Parser *p, int depth) {
    if (depth > DEPTH_LIMIT) return fail(p, "nested too deep");
    skip_space(p);
    switch (*p->at) {
    case '{':
        return read_items(p, depth, J_OBJECT, '}');
    case '[':
        return read_items(p, depth, J_ARRAY, ']');
    case '"': {
        char *text = read_text(p);
        Json *node = text != NULL ? make(J_STRING) : NULL;
        if (node == NULL) {
            free(text);
            return NULL;
        }
        node->text = text;
        return node;
    }
    case 't':
        return read_word(p, "true", J_BOOL, 1);
    case 'f':
        return read_word(p, "false", J_BOOL, 0);
    case 'n':
        return read_word(p, "null", J_NULL, 0);
    default:
        return read_number(p);
    }
}

Json *json_parse(const char *text, char *why, size_t why_size) {
    Parser p = {text, text, why, why_size};
    why[0] = 0;
    Json *tree = read_value(&p, 0);
    if (tree == NULL) return NULL;
    skip_space(&p);
    if (*p.at == 0) return tree;
    json_free(tree);
    return fail(&p, "something follows the end");
}
